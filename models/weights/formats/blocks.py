"""The formats of blocks, those of GGUF files and our own: the fields of a block, and the numbers that they stand for.

Our own are the groups of a safetensors checkpoint as a GPU takes them (see matrix.py):

    format   numbers  bytes  a block is
    INT4_64       64     36  f16 d, f16 m, u8 qs[32]    d * q + m
    INT4_128     128     68  f16 d, f16 m, u8 qs[64]    d * q + m
    INT8_32       32     36  f16 d, f16 m, i8 qs[32]    d * q + m
    FP8_128      128    132  f32 d, e4m3 qs[128]        d * q

Nibbles are laid out as in Q4_1: byte j holds number j in its low half and number j + block / 2 in its high half.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.weights.block_formats import Kind

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ROWS, COLUMNS = 8, 128
"""The size of a tile of a packed matrix (see models.weights.packing)."""
INTEGERS, FLOATS_OF_4, IQ4_CODES, FLOATS_OF_8 = range(4)
"""Kinds of codes: integers, MXFP4's small floating-point numbers, indices into a table, e4m3."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of IQ4_NL and IQ4_XS."""
_CHUNK = (1 << 15) - 1
"""How many numbers are handled at once. torch spreads larger tensors over threads, which then wait for each other after
every small operation: twice as fast on an idle machine, a hundred times slower on a busy one."""
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F

Fields = tuple[Tensor, Sequence[Tensor], Tensor | None]
"""codes uint8 [rows, blocks, numbers], scales (and minima) fp32 [rows, blocks, 1], None. With supers: codes uint8
[rows, blocks, groups, numbers], scales (and minima) as bytes [rows, blocks, groups], supers fp16 [rows, blocks, 1],
or [rows, blocks, 2] with minima."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What the blocks of a type hold, and how a GPU holds it in planes (see models.weights.packing)."""

    fields: Callable[[Tensor], Fields]
    """Splits blocks uint8 [rows, blocks, bytes]."""
    planes: tuple[int, ...]
    """The bits of each plane of codes, lowest bits first. A single plane of 8 bits has signed codes."""
    offset: int = 0
    """Subtracted from every code."""
    group: int = 32
    """How many neighbouring numbers are multiplied together, with one scale."""
    minimum: bool = False
    """Whether groups also have a minimum."""
    supers: bool = False
    """Whether scales are bytes, multiplied by a factor that 256 numbers have in common."""
    floats: int = INTEGERS
    """The kind of codes, INTEGERS to FLOATS_OF_8."""
    shared: int = 1
    """How many neighbouring groups have one scale (and minimum) in common."""
    nibbles: bool = False
    """Whether scale and minimum share a byte."""

    @property
    def width(self) -> int:
        """How many neighbouring numbers have one scale."""
        return self.group * self.shared

    @property
    def scales(self) -> torch.dtype:
        """The dtype of the plane of scales."""
        if self.supers:
            return torch.uint8 if self.nibbles else torch.int8
        return {FLOATS_OF_4: torch.bfloat16, FLOATS_OF_8: torch.float32}.get(self.floats, torch.float16)

    @property
    def values(self) -> int:
        """How many values a row of a tile has in the plane of scales."""
        return COLUMNS // self.width * (2 if self.minimum and not self.nibbles else 1)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in all planes; with supers, it includes half of those that two tiles share."""
        scales = ROWS * self.values * self.scales.itemsize
        return ROWS * COLUMNS * sum(self.planes) // 8 + scales + (ROWS * 2 if self.supers else 0)

    def expand(self, codes: Tensor, values: Sequence[Tensor], supers: Tensor | None, out: Tensor) -> None:
        """Write the numbers that fields stand for to `out`, contiguous fp32, of any shape with as many numbers."""
        if self.nibbles:
            values = values[0] & 15, values[0] >> 4
        if supers is not None:
            factors = supers.float().chunk(2, dim=-1)
            values = [(value * factor).unsqueeze(-1) for value, factor in zip(values, factors, strict=False)]
        numbers = self._meant(codes)
        out = out.view(numbers.shape).copy_(numbers)
        if self.floats == FLOATS_OF_4:
            out.mul_(2.0**15)
        if self.offset:
            out.sub_(self.offset)
        out.mul_(values[0])
        if self.minimum:
            out.add_(values[1], alpha=1 if supers is None else -1)

    def _meant(self, codes: Tensor) -> Tensor:
        """Return the unscaled values of uint8 codes, before the offset is subtracted; 2 ** 15 times too small for
        FLOATS_OF_4.
        """
        if self.floats == FLOATS_OF_8:
            return codes.view(torch.float8_e4m3fn)
        if self.floats == FLOATS_OF_4:
            # A sign, two exponent bits and one fraction bit become the leading bits of a half.
            digits = codes.short()
            return ((digits & 8) << 12 | (digits & 7) << 9).view(torch.float16)
        if self.floats == IQ4_CODES:
            return torch.tensor(IQ4, dtype=torch.int8, device=codes.device)[codes.int()]
        return codes.view(torch.int8) if self.planes == (8,) else codes


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
    found = BLOCKS.get(kind)
    if found is None:
        return None

    def decode(packed: Tensor) -> Tensor:
        out = torch.empty(packed.numel() // kind.block_bytes * kind.block, device=packed.device)
        found.expand(*found.fields(packed.view(1, -1, kind.block_bytes)), out)
        return out

    return decode


def dequantize(data: Tensor, kind: Kind, out: Tensor) -> None:
    """Write the numbers of blocks, uint8 [rows, bytes per row], to `out` [rows, columns]; both are contiguous.

    `kind` must be in BLOCKS. Numbers are computed in fp32 and rounded if `out` has another dtype.
    """
    wide = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
    found = BLOCKS[kind]
    found.expand(*found.fields(data.view(len(data), -1, kind.block_bytes)), wide)
    if wide is not out:
        out.copy_(wide)


def _rare(part: Bytes, kind: Kind) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.dequantize(part, gguf.GGMLQuantizationType(kind)))


def half_bytes(scales: Tensor) -> Tensor:
    """Round fp32 [..., 1] to halves and return their bytes, uint8 [..., 2]."""
    return scales.half().view(torch.uint8)


def pack_nibbles(digits: Tensor) -> Tensor:
    """Pack [..., 2 n] from 0 to 15 into uint8 [..., n]: the first half in the low nibbles, the second in the high."""
    first, second = digits.to(torch.uint8).chunk(2, dim=-1)
    return first | second << 4


def _nibbles(packed: Tensor) -> Tensor:
    """Split uint8 [..., n] into uint8 [..., 2 n]: all low nibbles, then all high ones; n is a multiple of 8."""
    words = _aligned(packed).view(torch.int64)  # eight bytes at once
    halves = torch.cat((words & _LOW_NIBBLES, (words >> 4).bitwise_and_(_LOW_NIBBLES)), dim=-1)
    return halves.view(torch.uint8)


def _aligned(packed: Tensor) -> Tensor:
    """Return a contiguous copy: fields of a block lie at any address, but a wider dtype needs an aligned one."""
    return packed.clone(memory_format=torch.contiguous_format)


def _halves(blocks: Tensor) -> Tensor:
    """View bytes as halves: uint8 [..., 2 n] -> fp16 [..., n]."""
    return _aligned(blocks).view(torch.float16)


def _split(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Split every byte into parts of `bits` bits, lowest first, along a new dimension: -1 or, before the last, -2."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(dim) >> (shifts if dim == -1 else shifts.unsqueeze(-1)) & ((1 << bits) - 1)


def _simple(head: int, codes: Callable[[Tensor], Tensor] | None = None) -> Callable[[Tensor], Fields]:
    """Return a reader of blocks whose first `head` bytes are the scale, and the minimum, as halves. Nibbles follow,
    unless `codes` reads the codes.
    """

    def read(blocks: Tensor) -> Fields:
        digits = _nibbles(blocks[..., head:]) if codes is None else codes(blocks)
        values = _halves(blocks[..., :head]).float()
        return digits, (values,) if head == 2 else values.chunk(2, dim=-1), None

    return read


def _fifth(start: int) -> Callable[[Tensor], Tensor]:
    """Return a reader of codes of 5 bits: the highest bits are in four bytes from `start` on, then come nibbles."""

    def read(blocks: Tensor) -> Tensor:
        high = _split(blocks[..., start : start + 4], 1, -1).flatten(-2) << 4
        return _nibbles(blocks[..., start + 4 :]) | high

    return read


def _k(codes: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Fields]:
    """Return a reader of Q4_K or Q5_K, whose scales and minima have 6 bits each, packed in 12 bytes."""

    def read(blocks: Tensor) -> Fields:
        first, second, rest = blocks[..., 4:16].chunk(3, dim=-1)
        scales = torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), dim=-1)
        minima = torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), dim=-1)
        return codes(blocks), [scales, minima], _halves(blocks[..., :4])

    return read


def _k_nibbles(packed: Tensor) -> Tensor:
    """Split the nibbles of K-quants: uint8 [rows, blocks, 128] -> uint8 [rows, blocks, 8, 32]."""
    shape = packed.shape[:2]
    return _nibbles(packed.reshape(*shape, 4, 32)).view(*shape, 8, 32)


def _q5_k(blocks: Tensor) -> Tensor:
    return _k_nibbles(blocks[..., 48:]) | _split(blocks[..., 16:48], 1, -2) << 4


def _q6_k(blocks: Tensor) -> Fields:
    shape = blocks.shape[:2]
    high = _split(blocks[..., 128:192].reshape(*shape, 2, 32), 2, -2) << 4
    digits = _nibbles(blocks[..., :128].reshape(*shape, 2, 64)).view(high.shape) | high
    return digits.view(*shape, 16, 16), [blocks[..., 192:208].view(torch.int8)], _halves(blocks[..., 208:])


def _mxfp4(blocks: Tensor) -> Fields:
    exponents = blocks[..., :1].int()
    # 2 ** (e - 128), which bf16 holds exactly, too.
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return _nibbles(blocks[..., 1:]), [bits.view(torch.float32)], None


def _q2_k(blocks: Tensor) -> Fields:
    shape = blocks.shape[:2]
    digits = _split(blocks[..., 16:80].reshape(*shape, 2, 32), 2, -2).reshape(*shape, 16, 16)
    return digits, [blocks[..., :16]], _halves(blocks[..., 80:])


def _q3_k(blocks: Tensor) -> Fields:
    """Read codes that are 4 too large; 12 bytes hold scales of 6 bits each that are 32 too large."""
    shape = blocks.shape[:2]
    high = _split(blocks[..., :32], 1, -2) << 2
    digits = _split(blocks[..., 32:96].reshape(*shape, 2, 32), 2, -2).reshape(high.shape) | high
    low, high = (
        _split(blocks[..., 96:104], 4, -2).flatten(-2),
        _split(blocks[..., 104:108], 2, -2).flatten(-2),
    )
    scales = (low | high << 4).view(torch.int8) - 32
    return digits.view(*shape, 16, 16), [scales], _halves(blocks[..., 108:])


def _iq4_xs(blocks: Tensor) -> Fields:
    """Read codes with scales of 6 bits each that are 32 too large."""
    low, high = _split(blocks[..., 4:8], 4, -1).flatten(-2), _split(blocks[..., 2:4], 2, -1).flatten(-2)
    digits = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))
    return digits, [(low | high << 4).view(torch.int8) - 32], _halves(blocks[..., :2])


def _fp8(blocks: Tensor) -> Fields:
    return blocks[..., 4:], [_aligned(blocks[..., :4]).view(torch.float32)], None


_PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}

BLOCKS: dict[Kind, BlockFormat] = {
    Kind.Q4_0: BlockFormat(_simple(2), (4,), offset=8),
    Kind.Q4_1: BlockFormat(_simple(4), (4,), minimum=True),
    Kind.Q5_0: BlockFormat(_simple(2, _fifth(2)), (4, 1), offset=16),
    Kind.Q5_1: BlockFormat(_simple(4, _fifth(4)), (4, 1), minimum=True),
    Kind.Q8_0: BlockFormat(_simple(2, lambda blocks: blocks[..., 2:]), (8,)),
    Kind.Q4_K: BlockFormat(_k(lambda blocks: _k_nibbles(blocks[..., 16:])), (4,), minimum=True, supers=True),
    Kind.Q5_K: BlockFormat(_k(_q5_k), (4, 1), minimum=True, supers=True),
    Kind.Q6_K: BlockFormat(_q6_k, (4, 2), offset=32, group=16, supers=True),
    Kind.MXFP4: BlockFormat(_mxfp4, (4,), floats=FLOATS_OF_4),
    Kind.Q2_K: BlockFormat(_q2_k, (2,), group=16, minimum=True, supers=True, nibbles=True),
    Kind.Q3_K: BlockFormat(_q3_k, (2, 1), offset=4, group=16, supers=True),
    Kind.IQ4_NL: BlockFormat(_simple(2), (4,), floats=IQ4_CODES),
    Kind.IQ4_XS: BlockFormat(_iq4_xs, (4,), supers=True, floats=IQ4_CODES),
    Kind.INT4_64: BlockFormat(_simple(4), (4,), minimum=True, shared=2),
    Kind.INT4_128: BlockFormat(_simple(4), (4,), minimum=True, shared=4),
    Kind.INT8_32: BlockFormat(_simple(4, lambda blocks: blocks[..., 4:]), (8,), minimum=True),
    Kind.FP8_128: BlockFormat(_fp8, (8,), floats=FLOATS_OF_8, shared=4),
}
"""The types that GPU kernels read, and that are expanded faster here than by the gguf package; the values are
bit-identical. Weights of other types are expanded.
"""
