"""Quantised weights in the layout that GPU kernels read: the same numbers as a GGUF file's blocks, in planes.

A matrix [rows, columns] is cut into tiles of 8 rows and 128 columns, padded with zeros. Every thread of a warp has 32
codes of a tile: thread 4 * row + t has those of the columns t * E to t * E + E - 1 of every group, where E = group / 4,
which is how tensor cores take them. Codes of 5 and 6 bits lie in two planes, with the low four bits in the first.

    codes   int32 [tiles of rows, tiles of columns, words]: 32 / bits codes per word. Neighbours lie 16 bits apart:
            pair p of a word is at bits b * p and b * p + 16, so that one shift and one mask extract both
    scales  [tiles of rows, tiles of columns, 8 rows, values]: for each row the scales of its groups, then their minima.
            fp16, or int8 where `supers` multiply them; bf16 for MXFP4, whose scales are powers of two; fp32 for fp8.
            uint8: a scale and a minimum in one byte, the scale in the low half
    supers  fp16 [tiles of rows, columns / 256, 8 rows, 2]: the factors that 256 numbers of a row have in common

A number is (code - offset) * scale, or code * scale + minimum; with supers, code * (super * scale) - super * minimum.
A code of MXFP4 stands for 0, 1, 2, 3, 4, 6, 8 or 12, or from 8 on for the negative of these; a code of IQ4_NL or IQ4_XS
for one of 16 numbers; a code of fp8 for that 8-bit number. The columns may be in a different order than in the matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.weights.block_formats import Kind
from models.weights.dequantize import (
    IQ4,
    aligned,
    fifth_bits,
    iq4_xs_digits,
    iq4_xs_scales,
    k_fields,
    k_nibbles,
    mxfp4_scales,
    nibbles,
    q2_k_digits,
    q3_k_digits,
    q3_k_scales,
    q5_k_digits,
    q6_k_digits,
)

ROWS, COLUMNS = 8, 128
"""The size of a tile."""
SUPER = 256
"""How many numbers of a row have one super in common."""
INTEGERS, FLOATS_OF_4, IQ4_CODES, FLOATS_OF_8 = range(4)
"""Kinds of codes: integers, MXFP4's small floating-point numbers, indices into a table, e4m3."""
_SMALL_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12)
SLAB = 1 << 22
"""How many numbers are packed or unpacked at once: they take 40 times as many bytes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of a type lie in planes."""

    planes: tuple[int, ...]
    """The bits of each plane of codes, lowest bits first. A single plane of 8 bits has signed codes."""
    offset: int
    """Subtracted from every code."""
    group: int
    """How many neighbouring numbers are multiplied together, with one scale."""
    minimum: bool
    """Whether groups also have a minimum."""
    supers: bool
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


PACKINGS: dict[Kind, Packing] = {
    Kind.Q4_0: Packing((4,), 8, 32, False, False),
    Kind.Q4_1: Packing((4,), 0, 32, True, False),
    Kind.Q5_0: Packing((4, 1), 16, 32, False, False),
    Kind.Q5_1: Packing((4, 1), 0, 32, True, False),
    Kind.Q8_0: Packing((8,), 0, 32, False, False),
    Kind.Q4_K: Packing((4,), 0, 32, True, True),
    Kind.Q5_K: Packing((4, 1), 0, 32, True, True),
    Kind.Q6_K: Packing((4, 2), 32, 16, False, True),
    Kind.MXFP4: Packing((4,), 0, 32, False, False, floats=FLOATS_OF_4),
    Kind.Q2_K: Packing((2,), 0, 16, True, True, nibbles=True),
    Kind.Q3_K: Packing((2, 1), 4, 16, False, True),
    Kind.IQ4_NL: Packing((4,), 0, 32, False, False, floats=IQ4_CODES),
    Kind.IQ4_XS: Packing((4,), 0, 32, False, True, floats=IQ4_CODES),
    Kind.INT4_64: Packing((4,), 0, 32, True, False, shared=2),
    Kind.INT4_128: Packing((4,), 0, 32, True, False, shared=4),
    Kind.INT8_32: Packing((8,), 0, 32, True, False),
    Kind.FP8_128: Packing((8,), 0, 32, False, False, floats=FLOATS_OF_8, shared=4),
}
"""The types that GPU kernels read. Weights of other types are expanded."""


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A packed matrix, or several matrices of one type, each of which begins with a new tile."""

    codes: tuple[Tensor, ...]
    scales: Tensor
    supers: Tensor | None
    order: Tensor | None = None
    """int32 [columns]: the matrix column at each place; None: columns are in order."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All planes, and the order of columns if there is one."""
        return (*self.codes, self.scales, *(x for x in (self.supers, self.order) if x is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.tensors)

    def cut(self, first: int, tiles: int) -> "Planes":
        """Return `tiles` tiles of rows, beginning with the tile `first`, as views of the same memory."""
        codes = tuple(plane.narrow(0, first, tiles) for plane in self.codes)
        supers = None if self.supers is None else self.supers.narrow(0, first, tiles)
        return Planes(codes, self.scales.narrow(0, first, tiles), supers, self.order)


def tiles(size: int, each: int) -> int:
    """Return how many tiles of size `each` cover `size`."""
    return -(-size // each)


def packed_bytes(kind: Kind, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in planes."""
    return tiles(rows, ROWS) * tiles(columns, COLUMNS) * PACKINGS[kind].tile_bytes


def empty_planes(kind: Kind, row_tiles: int, columns: int, device: torch.device) -> Planes:
    """Allocate planes for `row_tiles` tiles of rows."""
    packing, across = PACKINGS[kind], tiles(columns, COLUMNS)

    def plane(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(row_tiles, *shape, dtype=dtype, device=device)

    codes = tuple(plane(across, 32 * bits, dtype=torch.int32) for bits in packing.planes)
    scales = plane(across, ROWS, packing.values, dtype=packing.scales)
    supers = plane(across // 2, ROWS, 2, dtype=torch.float16) if packing.supers else None
    return Planes(codes, scales, supers)


def pack(data: Tensor, kind: Kind, out: Planes) -> None:
    """Pack the blocks of a matrix, uint8 [rows, bytes per row], into planes on the same device, some rows at a time."""
    packing = PACKINGS[kind]
    columns = data.shape[1] // kind.block_bytes * kind.block
    step = max(1, SLAB // (columns * ROWS)) * ROWS
    for start in range(0, len(data), step):
        rows = data[start : start + step]
        blocks = rows.reshape(len(rows), -1, kind.block_bytes)
        codes, values, supers = _READERS[kind](blocks)
        part = out.cut(start // ROWS, tiles(len(rows), ROWS))
        _pack_codes(_padded(codes.reshape(len(rows), -1), COLUMNS), packing, part.codes)
        per = COLUMNS // packing.width
        each = [_padded(value.reshape(len(rows), -1), per) for value in values]
        cut = [value.view(-1, ROWS, value.shape[1] // per, per).transpose(1, 2) for value in each]
        part.scales.copy_(torch.cat(cut, -1))
        if supers is not None:
            assert part.supers is not None
            common = _padded(supers.reshape(len(rows), -1), 1)
            part.supers.copy_(common.view(len(part.supers), ROWS, -1, 2).transpose(1, 2))


def unpack(planes: Planes, kind: Kind, rows: Tensor, columns: int) -> Tensor:
    """Return the numbers [n, columns] of the rows int64 [n] in fp32, bit-identical to those of the blocks."""
    packing = PACKINGS[kind]
    at, line = rows // ROWS, rows % ROWS
    code = torch.zeros(len(rows), 1, dtype=torch.int32, device=rows.device)
    low = 0
    for bits, plane in zip(packing.planes, planes.codes, strict=True):
        found = plane[at].view(len(rows), -1, *_thread_words(bits))
        if found.dim() == 5:  # the words of a thread lie 16 bytes at a time
            found = found.transpose(2, 3).flatten(3)
        found = found.view(len(rows), found.shape[1], ROWS, 4, bits)
        found = found[torch.arange(len(rows), device=rows.device), :, line]  # [n, tiles, 4, words]
        digits = found.unsqueeze(-1) >> _shifts(bits, rows.device) & ((1 << bits) - 1)
        code = code + (digits.flatten(-2) << low).view(len(rows), -1)
        low += bits
    size = packing.group // 4
    code = code.view(len(rows), -1, 4, COLUMNS // packing.group, size).transpose(2, 3)
    numbers = _meant(code, packing).reshape(len(rows), -1, packing.width)
    across, values = planes.scales.shape[1], planes.scales[at, :, line]
    if packing.nibbles:
        values = torch.cat((values & 15, values >> 4), -1)
    scales, *minima = values.float().view(len(rows), across, -1, COLUMNS // packing.width).unbind(-2)
    if planes.supers is not None:
        common = planes.supers[at, :, line].float().repeat_interleave(2, 1)
        scales = scales * common[..., :1]
        minima = [minimum * -common[..., 1:] for minimum in minima]
    numbers *= scales.reshape(len(rows), -1, 1)
    for minimum in minima:
        numbers += minimum.reshape(len(rows), -1, 1)
    found = numbers.view(len(rows), -1)[:, :columns]
    if planes.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, planes.order.long(), found)


def _meant(code: Tensor, packing: Packing) -> Tensor:
    """Return the unscaled values of int32 codes (from 0 on), fp32."""
    if packing.floats == FLOATS_OF_8:
        return code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    if packing.planes == (8,):
        code = code - (code & 128) * 2
    elif packing.floats:
        negative = tuple(-size for size in _SMALL_FLOATS)
        table = IQ4 if packing.floats == IQ4_CODES else _SMALL_FLOATS + negative
        code = torch.tensor(table, dtype=torch.int32, device=code.device)[code]
    return (code - packing.offset).float()


def _thread_words(bits: int) -> tuple[int, ...]:
    """Return the shape of a tile's words: [32, words], or [2, 32, 4] where a thread has more than 16 bytes."""
    return (2, 32, 4) if bits == 8 else (32, bits)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return the bit at which each code of a word begins, in order."""
    code = torch.arange(32 // bits, dtype=torch.int32, device=device)
    return code // 2 * bits + code % 2 * 16


def _pack_codes(codes: Tensor, packing: Packing, planes: Sequence[Tensor]) -> None:
    """Pack codes uint8 [8 n, 128 m] into the words of each plane, [n, m, words]."""
    size = packing.group // 4
    cut = codes.view(-1, ROWS, codes.shape[1] // COLUMNS, COLUMNS // packing.group, 4, size)
    threads = cut.permute(0, 2, 1, 4, 3, 5).reshape(cut.shape[0], cut.shape[2], 32, 32)
    low = 0
    for bits, plane in zip(packing.planes, planes, strict=True):
        digits = (threads >> low & ((1 << bits) - 1)).view(*threads.shape[:3], bits, -1).int()
        words = (digits << _shifts(bits, codes.device)).sum(-1, dtype=torch.int32)
        if bits == 8:
            words = words.view(*words.shape[:3], 2, 4).transpose(2, 3)
        plane.copy_(words.reshape(plane.shape))
        low += bits


def _padded(given: Tensor, each: int) -> Tensor:
    """Pad [rows, n] with zeros to [8 k, each * m]."""
    rows, columns = given.shape
    return torch.nn.functional.pad(given, (0, -columns % each, 0, -rows % ROWS))


_Fields = tuple[Tensor, list[Tensor], Tensor | None]
"""codes uint8 [rows, blocks, numbers], scales (and minima) [rows, groups], supers fp16 [rows, blocks, 2]."""


def _halves(blocks: Tensor) -> Tensor:
    """View bytes as halves: uint8 [..., 2 n] -> fp16 [..., n]."""
    return aligned(blocks).view(torch.float16)


def _simple(code: int, digits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], _Fields]:
    """Return a reader of blocks of 32 whose first `code` bytes are the scale, and the minimum, as halves."""

    def read(blocks: Tensor) -> _Fields:
        found = _halves(blocks[..., :code])
        return digits(blocks), list(found.unbind(-1)), None

    return read


def _k(digits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], _Fields]:
    """Return a reader of Q4_K or Q5_K."""

    def read(blocks: Tensor) -> _Fields:
        scales, minima = k_fields(blocks)
        return digits(blocks), [scales, minima], _halves(blocks[..., :4])

    return read


def _q6_k(blocks: Tensor) -> _Fields:
    scales = aligned(blocks[..., 192:208]).view(torch.int8)
    supers = torch.nn.functional.pad(_halves(blocks[..., 208:]), (0, 1))
    return q6_k_digits(blocks), [scales], supers


def _mxfp4(blocks: Tensor) -> _Fields:
    return nibbles(blocks[..., 1:]), [mxfp4_scales(blocks)[..., 0].bfloat16()], None


def _with_one_super(
    digits: Callable[[Tensor], Tensor], scales: Callable[[Tensor], Tensor], at: slice
) -> Callable[[Tensor], _Fields]:
    """Return a reader of blocks of 256 whose scales have a half in common."""

    def read(blocks: Tensor) -> _Fields:
        supers = torch.nn.functional.pad(_halves(blocks[..., at]), (0, 1))
        return digits(blocks), [scales(blocks)], supers

    return read


def _q2_k(blocks: Tensor) -> _Fields:
    return q2_k_digits(blocks), [blocks[..., :16]], _halves(blocks[..., 80:])


def _fp8(blocks: Tensor) -> _Fields:
    return blocks[..., 4:], [aligned(blocks[..., :4]).view(torch.float32)], None


_READERS: dict[Kind, Callable[[Tensor], _Fields]] = {
    Kind.Q4_0: _simple(2, lambda blocks: nibbles(blocks[..., 2:])),
    Kind.Q4_1: _simple(4, lambda blocks: nibbles(blocks[..., 4:])),
    Kind.Q5_0: _simple(2, lambda blocks: nibbles(blocks[..., 6:]) | fifth_bits(blocks[..., 2:6])),
    Kind.Q5_1: _simple(4, lambda blocks: nibbles(blocks[..., 8:]) | fifth_bits(blocks[..., 4:8])),
    Kind.Q8_0: _simple(2, lambda blocks: blocks[..., 2:]),
    Kind.Q4_K: _k(lambda blocks: k_nibbles(blocks[..., 16:])),
    Kind.Q5_K: _k(q5_k_digits),
    Kind.Q6_K: _q6_k,
    Kind.MXFP4: _mxfp4,
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _with_one_super(q3_k_digits, q3_k_scales, slice(108, 110)),
    Kind.IQ4_NL: _simple(2, lambda blocks: nibbles(blocks[..., 2:])),
    Kind.IQ4_XS: _with_one_super(iq4_xs_digits, iq4_xs_scales, slice(0, 2)),
    Kind.INT4_64: _simple(4, lambda blocks: nibbles(blocks[..., 4:])),
    Kind.INT4_128: _simple(4, lambda blocks: nibbles(blocks[..., 4:])),
    Kind.INT8_32: _simple(4, lambda blocks: blocks[..., 4:]),
    Kind.FP8_128: _fp8,
}
