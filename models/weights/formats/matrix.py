"""Matrices whose digits and scales lie in separate tensors: what each format makes of them, in one common form.

A number is (digit - zero) * scale. Integers are signed: 4 bits range from -8 to 7, 8 bits from -128 to 127.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from models.errors import faulty
from models.weights.block_formats import Kind
from models.weights.checkpoint import FLOATS, TYPES, Blocks, StoredTensor, copy_parts
from models.weights.formats.blocks import chunks, half_bytes, pack_nibbles

Shape = tuple[int, ...]
Read = Callable[[torch.device], Tensor]
"""Reads a tensor to a device."""

_CPU = torch.device("cpu")
_NEAR, _FAR = 1 << 15, 1 << 24
"""How many numbers are computed at once, on a CPU (see models.weights.formats.blocks) and on a GPU."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [rows, columns] that is not read yet."""

    rows: int
    columns: int
    bits: int
    """Bits of a digit."""
    digits: Read
    """int8 or float8 [rows, columns]"""
    scales: Read
    """fp32 [rows, groups]"""
    zeros: Read | None = None
    """int8 [rows, groups]; None: all are 0."""
    order: Tensor | None = None
    """int64 [columns]: the group of each column. None: groups have equal widths and follow each other."""
    is_integer: bool = True

    def stored(self, name: str, nbytes: int, quantized: str) -> StoredTensor:
        """Return the tensor `name` of a checkpoint, which takes `nbytes` there and is `quantized`, for display."""

        def copy_into(out: Tensor) -> None:
            # Copy the packed tensors to the device and decode them there.
            for start, values in self.numbers(out.device):
                out[start : start + len(values)] = values

        def cut(start: int, rows: int) -> StoredTensor:
            return self.cut(start, rows).stored(name, nbytes * rows // self.rows, quantized)

        blocks, on_device = self._blocks()
        shape = (self.rows, self.columns)
        return StoredTensor(
            name, shape, nbytes, copy_into, None, self.numbers, blocks, on_device, cut, quantized=quantized
        )

    def cut(self, start: int, rows: int) -> "GroupedMatrix":
        """Return these rows alone."""

        def cut(read: Read) -> Read:
            return lambda device: read(device)[start : start + rows]

        zeros = None if self.zeros is None else cut(self.zeros)
        return replace(self, rows=rows, digits=cut(self.digits), scales=cut(self.scales), zeros=zeros)

    def numbers(self, device: torch.device = _CPU) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, fp32 [some rows, columns] on `device`), in order."""
        digits, scales = self.digits(device), self.scales(device)
        zeros = None if self.zeros is None else self.zeros(device)
        order = None if self.order is None else self.order.to(device)
        step = max(1, (_NEAR if device.type == "cpu" else _FAR) // self.columns)
        for start in range(0, self.rows, step):
            rows = slice(start, start + step)
            values = digits[rows].float()
            scale, zero = scales[rows], None if zeros is None else zeros[rows].float()
            if order is None:
                values = values.view(len(values), scale.shape[1], -1)
                scale, zero = scale.unsqueeze(-1), None if zero is None else zero.unsqueeze(-1)
            else:
                scale, zero = scale[:, order], None if zero is None else zero[:, order]
            if zero is not None:
                values -= zero
            yield start, (values * scale).view(len(values), -1)

    def _blocks(self) -> tuple[Blocks | None, Blocks | None]:
        """Return the blocks for a CPU, and those for a GPU, that hold the numbers with no more rounding than bf16;
        None where no type can. For a GPU, columns are put in the order of their groups.
        """
        scales = self.scales(_CPU)
        if self.is_integer and not _halves_hold(scales, 16 if self.bits == 4 else 128):
            return None, None
        groups, order = self.order, None
        if groups is None:
            groups = torch.arange(self.columns) // (self.columns // scales.shape[1])
        elif bool((groups.diff() < 0).any()):
            order = groups.argsort(stable=True)
            groups = groups[order]
        held = []
        for kind in self._kinds():
            if self.columns % kind.block == 0:
                each = groups.view(-1, kind.block)
                if bool((each == each[:, :1]).all()):
                    rows = partial(self._rows, kind, order, each[:, 0].clone())
                    held.append(Blocks(kind, rows, order=order))
        near = held[-1] if held and self.order is None and not held[-1].kind.is_own else None
        return near, held[0] if held else None

    def _kinds(self) -> tuple[Kind, ...]:
        """Return the types that may hold the matrix, widest groups first."""
        if not self.is_integer:
            return (Kind.FP8_128,)
        symmetric = self.zeros is None or not bool(self.zeros(_CPU).any())
        if self.bits == 4:
            return (Kind.INT4_128, Kind.INT4_64, Kind.Q4_0 if symmetric else Kind.Q4_1)
        return (Kind.Q8_0 if symmetric else Kind.INT8_32,)

    def _rows(self, kind: Kind, order: Tensor | None, groups: Tensor, device: torch.device) -> Tensor:
        """Make the blocks, uint8 [rows, bytes per row], on `device`; `groups` has the group of each block of a row."""
        digits, groups = self.digits(device), groups.to(device)
        if not self.is_integer:
            digits = digits.view(torch.uint8)
        if order is not None:
            digits = digits[:, order.to(device)]
        digits = digits.reshape(self.rows, -1, kind.block)
        scales = self.scales(device)[:, groups].unsqueeze(-1).contiguous()
        zero = 8 if self.bits == 4 else 0
        parts = [scales.view(torch.uint8) if kind == Kind.FP8_128 else half_bytes(scales)]
        if kind in (Kind.INT4_128, Kind.INT4_64, Kind.INT8_32, Kind.Q4_1):
            zeros = 0 if self.zeros is None else self.zeros(device)[:, groups].unsqueeze(-1).float()
            parts.append(half_bytes(-scales * (zeros + zero)))
        parts.append(pack_nibbles(digits + zero) if zero else digits.view(torch.uint8))
        return torch.cat(parts, dim=-1).view(self.rows, -1)


def _halves_hold(scales: Tensor, times: int) -> bool:
    """Return whether fp16 rounds scales no more than bf16 rounds numbers, and can hold `times` times each scale."""
    error = (scales.half().float() - scales).abs()
    return bool((error <= scales.abs() * 2**-9).all() and (times * scales).half().isfinite().all())


@dataclass(frozen=True, slots=True)
class MatrixTensors:
    """The tensors of one matrix, by their suffixes in the format, and what formats have in common in reading them.

    All methods raise ModelError for tensors that do not fit together.
    """

    stem: str
    name: str
    """The name of the matrix."""
    tensors: Mapping[str, StoredTensor]
    quantized: str
    """The scheme of the checkpoint, for display."""

    def __contains__(self, part: str) -> bool:
        """Return whether there is a tensor with this suffix."""
        return part in self.tensors

    def read(self, part: str, kind: str, device: torch.device = _CPU) -> Tensor:
        """Read a tensor as numbers of a type, as safetensors calls it."""
        stored = self.tensors[part]
        if (stored.type in FLOATS) != (kind in FLOATS):
            wanted = "fractions" if kind in FLOATS else "integers"
            raise faulty(f"{stored.name} is of type {stored.type}, but must hold {wanted}")
        out = torch.empty(stored.shape, dtype=TYPES[kind])
        stored.copy_into(out)
        return out.to(device)

    def shape(self, part: str, size: int = 2) -> Shape:
        """Return the shape of a tensor, which must have `size` dimensions, none of them 0."""
        shape = self.tensors[part].shape
        if len(shape) != size or 0 in shape:
            raise self.faulty(
                part, f"the shape {list(shape)}, but needs {size} dimensions, none of them 0", "damaged"
            )
        return shape

    def expect(self, part: str, *shapes: Shape) -> None:
        """Check that a tensor has one of these shapes, if it is there."""
        if part in self and (shape := self.tensors[part].shape) not in shapes:
            wanted = " or ".join(str(list(wanted)) for wanted in shapes)
            raise self.faulty(
                part, f"the shape {list(shape)}, but the other tensors of {self.stem} require {wanted}"
            )

    def faulty(self, part: str, has: str, how: str = "inconsistent") -> Exception:
        """Return the error for a tensor that has something wrong."""
        return faulty(f"{self.tensors[part].name} has {has}", how)

    def bits(self, part: str, words: int, numbers: int) -> int:
        """Return the bits of a digit if `words` words hold `numbers` digits."""
        for bits in (4, 8):
            if words == -(-numbers * bits // 32):
                return bits
        raise self.faulty(part, f"{words} words for {numbers} numbers, which is neither 4 nor 8 bits each")

    def order(
        self, part: str, count: int, columns: int, width: int | None, index: str | None = None
    ) -> Tensor | None:
        """Return the group of each column, for the `count` groups of the scales `part`: as the tensor `index` gives it,
        if there is one, else each of `width` columns (None: all columns). None if groups are full and in order.
        """
        if index is not None and index in self:
            order = self.read(index, "I32").long()
            if (odd := order[(order < 0) | (order >= count)]).numel():
                raise faulty(f"{self.tensors[index].name} names group {int(odd[0])}, but there are {count}")
            plain = columns % count == 0 and torch.equal(order, torch.arange(columns) // (columns // count))
            return None if plain else order
        width = columns if width is None else min(width, columns)
        if (needed := -(-columns // width)) != count:
            has = f"scales of {count} groups, but {columns} columns have {needed} of {width}"
            raise self.faulty(part, has)
        return None if columns == count * width else torch.arange(columns) // width

    def grid(self, part: str, rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int, int]:
        """Return the rows with common scales, the groups of a row and their width, from the shape of the scales `part`.

        `block` has the rows and columns with a common scale, for scales that belong to neither a row nor a group.
        """
        shape = self.tensors[part].shape
        if shape in ((), (1,), (1, 1)):
            return rows, 1, columns
        if shape == (rows,):
            return 1, 1, columns
        is_grouped = len(shape) == 2 and shape[0] == rows and shape[1]
        if is_grouped and (columns % shape[1] == 0 or ".weight_g_idx" in self):
            return 1, shape[1], -(-columns // shape[1])
        high, wide = min(block[0], rows), min(block[1], columns)
        blocks = -(-rows // high), -(-columns // wide)
        self.expect(part, (), (rows, 1), blocks)
        return high, blocks[1], wide

    def reader(self, part: str, kind: str = "F32") -> Read:
        """Return a reader of a tensor as numbers of a type; fractions must be finite."""

        def read(device: torch.device) -> Tensor:
            found = self.read(part, kind, device)
            if kind in FLOATS:
                odd = ~found.isfinite()
            elif kind == "F8_E4M3":
                odd = found.view(torch.uint8) & 127 == 127
            else:
                return found
            if bool(odd.any()):
                raise self.faulty(part, "values that are not numbers", "damaged")
            return found

        return read

    def spread(self, read: Read, rows: int, high: int, groups: int) -> Read:
        """Repeat the scales of blocks that are `high` rows each: -> [rows, groups]."""
        return lambda device: read(device).reshape(-1, groups).repeat_interleave(high, dim=0)[:rows]

    def words(self, part: str, bits: int, add: int = 0, down: bool = False) -> Read:
        """Return a reader of words [n, m], plus `add`, as int8 [n, m * 32 / bits], lowest digits first. If they lie
        `down` the rows, as int8 [n * 32 / bits, m].
        """

        def read(device: torch.device) -> Tensor:
            words = self.read(part, "I32", device)
            words = words + add if add else words
            stored = (words.T if down else words).contiguous().view(torch.uint8)
            if bits == 8:
                digits = (stored ^ 0x80).view(torch.int8)
            else:
                digits = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).view(torch.int8).sub_(8)
            return digits.T if down else digits

        return read

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(part.nbytes for part in self.tensors.values())

    def in_blocks(
        self, kind: Kind, shape: Shape, rows: Read, cut: Callable[[int, int], StoredTensor]
    ) -> StoredTensor:
        """Return the tensor of a matrix, or several, in blocks. `rows` reads uint8 [rows, bytes per row]; `cut` is that
        of the tensor.
        """

        def parts() -> Iterator[tuple[int, Tensor]]:
            return chunks(rows(_CPU).numpy(), kind)

        def copy_into(out: Tensor) -> None:
            copy_parts(parts(), out)

        return StoredTensor(
            self.name, shape, self.nbytes, copy_into, None, parts, Blocks(kind, rows), cut=cut
        )

    def matrix(
        self,
        shape: tuple[int, int],
        bits: int,
        digits: Read,
        scales: Read,
        zeros: Read | None,
        order: Tensor | None,
        is_integer: bool = True,
    ) -> StoredTensor:
        """Return the tensor of a matrix in groups (see GroupedMatrix for the arguments)."""
        matrix = GroupedMatrix(*shape, bits, digits, scales, zeros, order, is_integer)
        return matrix.stored(self.name, self.nbytes, self.quantized)
