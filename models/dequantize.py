"""From the bytes of a GGUF tensor to numbers, some rows at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_CHUNK = (1 << 15) - 1
"""Numbers handled at once. torch spreads larger tensors over threads, which must then wait for each other after
every small operation: twice as fast on an idle machine, a hundred times slower on a busy one."""


def chunks(data: Bytes, kind: Kind, order: Bytes | None = None) -> Iterator[tuple[int, Tensor]]:
    """(first row, numbers [some rows, row length]) of a tensor [rows, bytes a row], from first to last.

    `order` lists which row of the file comes at each place. fp32, but bf16 and fp16 tensors keep their dtype.
    Raises NotImplementedError for a type that neither this file nor the gguf package reads.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    read = _READERS.get(kind) or (lambda part: torch.from_numpy(gguf.dequantize(part, kind)))
    step = max(1, _CHUNK * block_bytes // (block * max(1, data.shape[1])))
    for start in range(0, len(data), step):
        part = data[start : start + step] if order is None else data[order[start : start + step]]
        yield start, read(part)


def decoder(kind: Kind) -> Callable[[Tensor], Tensor] | None:
    """What makes numbers [m] of whole blocks, uint8 [n], on the device where they are; None for a type that only
    the gguf package reads. The values are those of `chunks`.
    """
    read = _READERS.get(kind)
    return None if read is None else lambda packed: read(packed.unsqueeze(0)).squeeze(0)


def _blocks(part: Bytes | Tensor, size: int) -> Tensor:
    """[rows, blocks, bytes a block]; of an array a copy, for torch cannot hold memory that may not be written"""
    packed = part if isinstance(part, Tensor) else torch.from_numpy(np.array(part))
    return packed.view(len(part), -1, size)


def _half(scales: Tensor) -> Tensor:
    """uint8 [..., 2 n] -> fp32 [..., n]"""
    return scales.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n]: all low halves, then all high halves"""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [..., 4] -> uint8 [..., 32]: every bit, the lowest first, as 0 or 16"""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2)


def _q8_0(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 34)
    return (blocks[..., 2:].view(torch.int8).float() * _half(blocks[..., :2])).flatten(1)


def _q4_0(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 18)
    return _nibbles(blocks[..., 2:]).float().sub_(8).mul_(_half(blocks[..., :2])).flatten(1)


def _q4_1(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 20)
    scale, low = _half(blocks[..., :4]).chunk(2, dim=-1)
    return _nibbles(blocks[..., 4:]).float().mul_(scale).add_(low).flatten(1)


def _q5_0(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 22)
    digits = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return digits.float().sub_(16).mul_(_half(blocks[..., :2])).flatten(1)


def _q5_1(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 24)
    scale, low = _half(blocks[..., :4]).chunk(2, dim=-1)
    digits = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return digits.float().mul_(scale).add_(low).flatten(1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, fp32 [rows, blocks, 8, 1], of Q4_K and Q5_K: 6 bits each, packed in 12 bytes."""
    scale, low = _half(blocks[..., :4]).chunk(2, dim=-1)
    first, second, rest = blocks[..., 4:16].chunk(3, dim=-1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), dim=-1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), dim=-1)
    return (scale * scales).unsqueeze(-1), (low * minima).unsqueeze(-1)


def _k_nibbles(packed: Tensor) -> Tensor:
    """uint8 [rows, blocks, 128] -> uint8 [rows, blocks, 8, 32]"""
    shape = packed.shape[:2]
    return _nibbles(packed.reshape(*shape, 4, 32)).view(*shape, 8, 32)


def _q4_k(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 144)
    scales, minima = _k_scales(blocks)
    digits = _k_nibbles(blocks[..., 16:])
    return digits.float().mul_(scales).sub_(minima).flatten(1)


def _q5_k(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 176)
    scales, minima = _k_scales(blocks)
    digits = _k_nibbles(blocks[..., 48:])
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    digits |= (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1) << 4
    return digits.float().mul_(scales).sub_(minima).flatten(1)


def _q6_k(part: Bytes | Tensor) -> Tensor:
    blocks = _blocks(part, 210)
    scales = _half(blocks[..., 208:]) * blocks[..., 192:208].view(torch.int8)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    shape = blocks.shape[:2]
    high = (blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3) << 4
    digits = _nibbles(blocks[..., :128].reshape(*shape, 2, 64)).view(*shape, 2, 4, 32) | high
    return digits.view(*shape, 16, 16).float().sub_(32).mul_(scales.unsqueeze(-1)).flatten(1)


def _plain(dtype: torch.dtype) -> Callable[[Bytes | Tensor], Tensor]:
    return lambda part: _blocks(part, dtype.itemsize).flatten(1).view(dtype)


_READERS: dict[Kind, Callable[[Bytes | Tensor], Tensor]] = {
    Kind.F32: _plain(torch.float32),
    Kind.F16: _plain(torch.float16),
    Kind.BF16: _plain(torch.bfloat16),
    Kind.Q8_0: _q8_0,
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
"""The types that chatterm reads faster than the gguf package; the values are the same to the bit."""
