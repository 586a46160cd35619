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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS, COLUMNS, ROWS, BlockFormat

SLAB = 1 << 22
"""How many numbers are packed or unpacked at once: they take 40 times as many bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A packed matrix, or several matrices of one type below each other, each of which begins with a new tile."""

    kind: Kind
    rows: int
    columns: int
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

    def cut(self, start: int, rows: int) -> "Planes":
        """Return `rows` rows from `start` on, which must begin a tile, as views of the same memory."""
        part = slice(start // ROWS, start // ROWS + tiles(rows, ROWS))
        codes = tuple(plane[part] for plane in self.codes)
        supers = None if self.supers is None else self.supers[part]
        return replace(self, rows=rows, codes=codes, scales=self.scales[part], supers=supers)


def tiles(size: int, each: int) -> int:
    """Return how many tiles of size `each` cover `size`."""
    return -(-size // each)


def packed_bytes(kind: Kind, rows: int, columns: int) -> int:
    """Return the bytes of a matrix in planes."""
    return tiles(rows, ROWS) * tiles(columns, COLUMNS) * BLOCKS[kind].tile_bytes


def empty_planes(kind: Kind, rows: int, columns: int, device: torch.device) -> Planes:
    """Allocate planes for a matrix."""
    packing, across = BLOCKS[kind], tiles(columns, COLUMNS)

    def plane(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(tiles(rows, ROWS), *shape, dtype=dtype, device=device)

    codes = tuple(plane(across, 32 * bits, dtype=torch.int32) for bits in packing.planes)
    scales = plane(across, ROWS, packing.values, dtype=packing.scales)
    supers = plane(across // 2, ROWS, 2, dtype=torch.float16) if packing.supers else None
    return Planes(kind, rows, columns, codes, scales, supers)


def pack(data: Tensor, out: Planes) -> None:
    """Pack the blocks of a matrix, uint8 [rows, bytes per row], into planes on the same device, some rows at a time."""
    packing = BLOCKS[out.kind]
    for part, rows in slabs(out, data):
        codes, values, supers = packing.fields(rows.reshape(len(rows), -1, out.kind.block_bytes))
        _pack_codes(_padded(codes.reshape(len(rows), -1), COLUMNS), packing, part.codes)
        per = COLUMNS // packing.width
        each = [_padded(value.reshape(len(rows), -1), per) for value in values]
        cut = [value.view(-1, ROWS, value.shape[1] // per, per).transpose(1, 2) for value in each]
        part.scales.copy_(torch.cat(cut, -1))
        if supers is not None:
            assert part.supers is not None
            both = torch.nn.functional.pad(supers, (0, 2 - supers.shape[-1]))
            common = _padded(both.view(len(rows), -1), 1)
            part.supers.copy_(common.view(len(part.supers), ROWS, -1, 2).transpose(1, 2))


def slabs(planes: Planes, data: Tensor) -> Iterator[tuple[Planes, Tensor]]:
    """Cut planes, and tensors [rows, ...] for them, into parts of at most SLAB numbers, but at least a tile of rows."""
    step = max(1, SLAB // (planes.columns * ROWS)) * ROWS
    for start in range(0, planes.rows, step):
        rows = data[start : start + step]
        yield planes.cut(start, len(rows)), rows


def unpack(planes: Planes, rows: Tensor) -> Tensor:
    """Return the numbers [n, columns] of the rows int64 [n] in fp32, bit-identical to those of the blocks."""
    packing = BLOCKS[planes.kind]
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
    across, values = planes.scales.shape[1], planes.scales[at, :, line]
    groups = len(rows), across, COLUMNS // packing.width
    each = values.view(len(rows), across, -1, groups[-1]).unbind(-2)
    if planes.supers is None:
        each, supers = tuple(value.unsqueeze(-1) for value in each), None
    else:
        supers = planes.supers[at, :, line].repeat_interleave(2, 1)
    numbers = torch.empty(len(rows), across * COLUMNS, device=rows.device)
    packing.expand(code.to(torch.uint8).reshape(*groups, packing.width), each, supers, numbers)
    found = numbers[:, : planes.columns]
    if planes.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, planes.order.long(), found)


def _thread_words(bits: int) -> tuple[int, ...]:
    """Return the shape of a tile's words: [32, words], or [2, 32, 4] where a thread has more than 16 bytes."""
    return (2, 32, 4) if bits == 8 else (32, bits)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return the bit at which each code of a word begins, in order."""
    code = torch.arange(32 // bits, dtype=torch.int32, device=device)
    return code // 2 * bits + code % 2 * 16


def _pack_codes(codes: Tensor, packing: BlockFormat, planes: Sequence[Tensor]) -> None:
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
