"""Decode the bytes of a GGUF tensor to numbers, some rows at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.weights.block_formats import Kind

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_CHUNK = (1 << 15) - 1
"""How many numbers are handled at once. torch spreads larger tensors over threads, which then wait for each other after
every small operation: twice as fast on an idle machine, a hundred times slower on a busy one."""
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


def chunks(data: Bytes, kind: Kind, order: Bytes | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, numbers [some rows, row length]) of a tensor [rows, bytes per row], in order.

    `order` has the file row for each place. Numbers are fp32, but bf16 and fp16 tensors keep their dtype.
    Raises NotImplementedError for a type that neither this file nor the gguf package reads.
    """
    decode = decoder(kind)
    step = max(1, _CHUNK * kind.block_bytes // (kind.block * max(1, data.shape[1])))
    for start in range(0, len(data), step):
        part = data[start : start + step] if order is None else data[order[start : start + step]]
        if decode is None:
            yield start, _rare(part, kind)
        else:
            # A copy, because torch cannot wrap read-only memory.
            yield start, decode(torch.from_numpy(np.array(part)).flatten()).view(len(part), -1)


def decoder(kind: Kind) -> Callable[[Tensor], Tensor] | None:
    """Return a function from whole blocks, uint8 [n], to numbers [m] on the same device; None for a type that only the
    gguf package reads. The values are those of `chunks`.
    """
    if kind in _PLAIN:
        return lambda packed: packed.view(_PLAIN[kind])
    if kind not in _READERS:
        return None

    def decode(packed: Tensor) -> Tensor:
        out = torch.empty(packed.numel() // kind.block_bytes * kind.block, device=packed.device)
        dequantize(packed.unsqueeze(0), kind, out.unsqueeze(0))
        return out

    return decode


def dequantize(data: Tensor, kind: Kind, out: Tensor) -> None:
    """Write the numbers of blocks, uint8 [rows, bytes per row], to `out` [rows, columns]; both are contiguous.

    `kind` must have a `decoder`. Numbers are computed in fp32 and rounded if `out` has another dtype.
    """
    wide = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
    blocks = data.view(len(data), -1, kind.block_bytes)
    _READERS[kind](blocks, wide.view(*blocks.shape[:2], kind.block))
    if wide is not out:
        out.copy_(wide)


def _rare(part: Bytes, kind: Kind) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.dequantize(part, gguf.GGMLQuantizationType(kind)))


def _half(scales: Tensor) -> Tensor:
    """View bytes as halves: uint8 [..., 2 n] -> fp32 [..., n]."""
    return aligned(scales).view(torch.float16).float()


def aligned(packed: Tensor) -> Tensor:
    """Return a contiguous copy: fields of a block lie at any address, but a wider dtype needs an aligned one."""
    return packed.clone(memory_format=torch.contiguous_format)


def nibbles(packed: Tensor) -> Tensor:
    """Split uint8 [..., n] into uint8 [..., 2 n]: all low nibbles, then all high ones; n is a multiple of 8."""
    words = aligned(packed).view(torch.int64)  # eight bytes at once
    halves = torch.cat((words & _LOW_NIBBLES, (words >> 4).bitwise_and_(_LOW_NIBBLES)), dim=-1)
    return halves.view(torch.uint8)


def fifth_bits(packed: Tensor) -> Tensor:
    """Expand uint8 [..., 4] to uint8 [..., 32]: every bit, lowest first, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[..., 2:].view(torch.int8)).mul_(_half(blocks[..., :2]))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[..., 2:])).sub_(8).mul_(_half(blocks[..., :2]))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scale, low = _half(blocks[..., :4]).chunk(2, dim=-1)
    out.copy_(nibbles(blocks[..., 4:])).mul_(scale).add_(low)


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    digits = nibbles(blocks[..., 6:]) | fifth_bits(blocks[..., 2:6])
    out.copy_(digits).sub_(16).mul_(_half(blocks[..., :2]))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    scale, low = _half(blocks[..., :4]).chunk(2, dim=-1)
    digits = nibbles(blocks[..., 8:]) | fifth_bits(blocks[..., 4:8])
    out.copy_(digits).mul_(scale).add_(low)


def k_fields(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima, uint8 [rows, blocks, 8], of Q4_K and Q5_K: 6 bits each, packed in 12 bytes."""
    first, second, rest = blocks[..., 4:16].chunk(3, dim=-1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), dim=-1)
    return scales, torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), dim=-1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of Q4_K and Q5_K, multiplied by the block's own, fp32 [rows, blocks, 8, 1]."""
    scale, low = _half(blocks[..., :4]).chunk(2, dim=-1)
    scales, minima = k_fields(blocks)
    return (scale * scales).unsqueeze(-1), (low * minima).unsqueeze(-1)


def k_nibbles(packed: Tensor) -> Tensor:
    """Split the nibbles of K-quants: uint8 [rows, blocks, 128] -> uint8 [rows, blocks, 8, 32]."""
    shape = packed.shape[:2]
    return nibbles(packed.reshape(*shape, 4, 32)).view(*shape, 8, 32)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    digits = k_nibbles(blocks[..., 16:])
    out.view(digits.shape).copy_(digits).mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    digits = q5_k_digits(blocks)
    out.view(digits.shape).copy_(digits).mul_(scales).sub_(minima)


def q5_k_digits(blocks: Tensor) -> Tensor:
    """Return the digits of Q5_K blocks, uint8 [rows, blocks, 8, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    return k_nibbles(blocks[..., 48:]) | (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1) << 4


def q6_k_digits(blocks: Tensor) -> Tensor:
    """Return the digits of Q6_K blocks, uint8 [rows, blocks, 16, 16]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    shape = blocks.shape[:2]
    high = (blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3) << 4
    digits = nibbles(blocks[..., :128].reshape(*shape, 2, 64)).view(*shape, 2, 4, 32) | high
    return digits.view(*shape, 16, 16)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    scales = _half(blocks[..., 208:]) * blocks[..., 192:208].view(torch.int8)
    digits = q6_k_digits(blocks)
    out.view(digits.shape).copy_(digits).sub_(32).mul_(scales.unsqueeze(-1))


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    # A sign, two exponent bits and one fraction bit: as the leading bits of a half they are 2 ** 14 times too small.
    digits = nibbles(blocks[..., 1:]).short()
    halves = ((digits & 8) << 12 | (digits & 7) << 9).view(torch.float16)
    out.copy_(halves).mul_(2.0**15).mul_(mxfp4_scales(blocks))


def mxfp4_scales(blocks: Tensor) -> Tensor:
    """Return 2 ** (e - 128) as fp32 [..., 1]; bf16 holds these values exactly, too."""
    exponents = blocks[..., :1].int()
    return torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23).view(torch.float32)


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of IQ4_NL and IQ4_XS."""


def _meant(digits: Tensor) -> Tensor:
    return torch.tensor(IQ4, dtype=torch.int8, device=digits.device)[digits.int()]


def _quarters(packed: Tensor) -> Tensor:
    """Split each 32 bytes into pairs of bits, lowest first: uint8 [..., 32 n] -> uint8 [..., n, 4, 32]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return packed.reshape(*packed.shape[:-1], -1, 1, 32) >> shifts & 3


def q2_k_digits(blocks: Tensor) -> Tensor:
    """Return the digits of Q2_K blocks, uint8 [rows, blocks, 16, 16]."""
    return _quarters(blocks[..., 16:80]).reshape(*blocks.shape[:2], 16, 16)


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scale, low = _half(blocks[..., 80:]).chunk(2, dim=-1)
    digits, fields = q2_k_digits(blocks), blocks[..., :16]
    scales, minima = scale * (fields & 15), low * (fields >> 4)
    out.view(digits.shape).copy_(digits).mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1))


def q3_k_digits(blocks: Tensor) -> Tensor:
    """Return the digits of Q3_K blocks, uint8 [rows, blocks, 16, 16], 4 too large."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[..., None, :32] >> shifts & 1) << 2
    digits = _quarters(blocks[..., 32:96]).reshape(high.shape) | high
    return digits.view(*blocks.shape[:2], 16, 16)


def q3_k_scales(blocks: Tensor) -> Tensor:
    """Return int8 [rows, blocks, 16]; the file packs them in 12 bytes, 6 bits each and 32 too large."""
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    found = torch.cat((low & 15, low >> 4), dim=-1) | (high.unsqueeze(-2) >> shifts & 3).flatten(-2) << 4
    return found.view(torch.int8) - 32


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    scales, digits = _half(blocks[..., 108:]) * q3_k_scales(blocks), q3_k_digits(blocks)
    out.view(digits.shape).copy_(digits).sub_(4).mul_(scales.unsqueeze(-1))


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_meant(nibbles(blocks[..., 2:]))).mul_(_half(blocks[..., :2]))


def iq4_xs_digits(blocks: Tensor) -> Tensor:
    """Return the codes of IQ4_XS blocks, uint8 [rows, blocks, 8, 32]."""
    return nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Return int8 [rows, blocks, 8]; the file has them in 6 bits each and 32 too large."""
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    lows = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    return (lows | (high.unsqueeze(-1) >> shifts & 3).flatten(-2) << 4).view(torch.int8) - 32


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    scales, digits = _half(blocks[..., :2]) * iq4_xs_scales(blocks), iq4_xs_digits(blocks)
    out.view(digits.shape).copy_(_meant(digits)).mul_(scales.unsqueeze(-1))


_PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}

_READERS: dict[Kind, Callable[[Tensor, Tensor], None]] = {
    Kind.Q8_0: _q8_0,
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.MXFP4: _mxfp4,
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
}
"""The types that chatterm reads faster than the gguf package; the values are bit-identical."""
