"""Matrices whose digits and scales lie in separate tensors: read each layout of `quant_config` into one common form.

A number is (digit - zero) * scale. Integers are signed: 4 bits range from -8 to 7, 8 bits from -128 to 127.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.errors import ModelError
from models.weights.block_formats import Kind
from models.weights.checkpoint import FLOATS, StoredTensor
from models.weights.formats.blocks import half_bytes, pack_nibbles
from models.weights.quant_config import AWQ, FP8, GPTQ, INT8, PACKED, PACKED_BITS, Scheme

Read = Callable[[torch.device], Tensor]
"""Reads a tensor to a device."""

_CPU = torch.device("cpu")
_BLOCK = 32
_NEAR, _FAR = 1 << 15, 1 << 24
"""How many numbers are computed at once, on a CPU (see models.weights.formats.blocks) and on a GPU."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each column's digit among the eight digits of a word."""


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

    def cut(self, start: int, rows: int) -> "GroupedMatrix":
        """Return these rows alone."""
        zeros, stop = self.zeros, start + rows
        return replace(
            self,
            rows=rows,
            digits=lambda device: self.digits(device)[start:stop],
            scales=lambda device: self.scales(device)[start:stop],
            zeros=None if zeros is None else lambda device: zeros(device)[start:stop],
        )


@dataclass(frozen=True, slots=True)
class MatrixTensors:
    """The tensors of one matrix, by their suffixes in the layout."""

    stem: str
    tensors: Mapping[str, StoredTensor]
    scheme: Scheme

    def read(self, part: str, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
        """Read a tensor as it is stored. Raises ModelError if the file cannot be read or its type is another one."""
        stored = self.tensors[part]
        if (stored.type in FLOATS) != (dtype in FLOATS.values()):
            wanted = "fractions" if dtype in FLOATS.values() else "integers"
            raise ModelError(
                f"{stored.name} is of type {stored.type}, but must hold {wanted}; the checkpoint is damaged: "
                "download it again."
            )
        out = torch.empty(self.tensors[part].shape, dtype=dtype)
        self.tensors[part].copy_into(out)
        return out.to(device)

    def shape(self, part: str, size: int = 2) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError unless it has `size` dimensions and none of them is 0."""
        shape = self.tensors[part].shape
        if len(shape) != size or 0 in shape:
            raise ModelError(
                f"{self.tensors[part].name} has the shape {list(shape)}, but needs {size} dimensions, none of them 0; "
                "the checkpoint is damaged: download it again."
            )
        return shape

    def expect(self, part: str, *shapes: tuple[int, ...]) -> None:
        """Raise ModelError if a tensor is there but has none of these shapes."""
        if part in self.tensors and (shape := self.tensors[part].shape) not in shapes:
            wanted = " or ".join(str(list(wanted)) for wanted in shapes)
            raise ModelError(
                f"{self.tensors[part].name} has the shape {list(shape)}, but the other tensors of {self.stem} "
                f"require {wanted}; the checkpoint is inconsistent: download it again."
            )


def _bits(found: MatrixTensors, part: str, words: int, numbers: int) -> int:
    """Return the bits of a digit if `words` words hold `numbers` digits. Raises ModelError."""
    for bits in PACKED_BITS:
        if words == -(-numbers * bits // 32):
            return bits
    raise ModelError(
        f"{found.tensors[part].name} has {words} words for {numbers} numbers, which is neither 4 nor 8 bits each; "
        "the checkpoint is inconsistent: download it again."
    )


def _in_order(found: MatrixTensors, part: str, count: int, columns: int, width: int | None) -> Tensor | None:
    """Return the group of each of the columns for `count` groups of `width` columns (None: all columns) that follow
    each other; None if all groups are full. Raises ModelError if the counts do not match."""
    width = columns if width is None else min(width, columns)
    if -(-columns // width) != count:
        raise ModelError(
            f"{found.tensors[part].name} has scales of {count} groups, but {columns} columns have "
            f"{-(-columns // width)} of {width}; the checkpoint is inconsistent: download it again."
        )
    return None if columns == count * width else torch.arange(columns) // width


def _given_order(found: MatrixTensors, part: str, count: int, columns: int) -> Tensor | None:
    """Return the group of each column as given in the file; None if groups follow each other. Raises ModelError."""
    order = found.read(part, torch.int32).long()
    if (odd := order[(order < 0) | (order >= count)]).numel():
        raise ModelError(
            f"{found.tensors[part].name} names group {int(odd[0])}, but there are {count}; the checkpoint is "
            "damaged: download it again."
        )
    plain = columns % count == 0 and torch.equal(order, torch.arange(columns) // (columns // count))
    return None if plain else order


def _scales(found: MatrixTensors, part: str) -> Read:
    def read(device: torch.device) -> Tensor:
        scales = found.read(part, torch.float32, device)
        if not bool(scales.isfinite().all()):
            raise ModelError(
                f"{found.tensors[part].name} has values that are not numbers; the checkpoint is damaged: download it "
                "again."
            )
        return scales

    return read


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack words int32 [n, m] into int8 [n, m * 32 / bits], lowest digits first."""
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (stored ^ 0x80).view(torch.int8)
    digits = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    return digits.view(torch.int8).sub_(8)


def _awq(found: MatrixTensors) -> GroupedMatrix:
    """Read AutoAWQ's gemm layout: transposed, with eight digits of a row per word, even ones first."""
    groups, rows = found.shape(".scales")
    columns = found.shape(".qweight")[0]
    found.expect(".qweight", (columns, -(-rows // 8)))
    found.expect(".qzeros", (groups, -(-rows // 8)))

    def unpack(part: str, device: torch.device) -> Tensor:
        digits = _unpacked(found.read(part, torch.int32, device), 4)
        return digits.view(len(digits), -1, 8)[..., _AWQ_ORDER].flatten(1).T[:rows]

    scales = _scales(found, ".scales")
    return GroupedMatrix(
        rows,
        columns,
        4,
        lambda device: unpack(".qweight", device),
        lambda device: scales(device).T,
        (lambda device: unpack(".qzeros", device)) if ".qzeros" in found.tensors else None,
        _in_order(found, ".scales", groups, columns, found.scheme.group),
    )


def _gptq(found: MatrixTensors) -> GroupedMatrix:
    """Read the layout of AutoGPTQ and GPTQModel: transposed, with digits of a column in a word."""
    groups, rows = found.shape(".scales")
    bits = _bits(found, ".qzeros", found.shape(".qzeros")[1], rows)
    columns = found.shape(".qweight")[0] * 32 // bits
    found.expect(".qweight", (columns * bits // 32, rows))
    found.expect(".qzeros", (groups, -(-rows * bits // 32)))
    found.expect(".g_idx", (columns,))
    # Added to whole words, because it was subtracted from whole words: a digit of 0 borrowed from the next one.
    offset = sum(found.scheme.zero_offset << shift for shift in range(0, 32, bits))

    def digits(device: torch.device) -> Tensor:
        words = found.read(".qweight", torch.int32, device)
        parts = _unpacked(words.view(-1, 1), bits).view(len(words), rows, -1)
        return parts.transpose(0, 1).reshape(rows, -1)

    def zeros(device: torch.device) -> Tensor:
        return _unpacked(found.read(".qzeros", torch.int32, device) + offset, bits).T[:rows]

    if ".g_idx" in found.tensors:
        order = _given_order(found, ".g_idx", groups, columns)
    else:
        order = _in_order(found, ".scales", groups, columns, found.scheme.group)
    scales = _scales(found, ".scales")
    return GroupedMatrix(rows, columns, bits, digits, lambda device: scales(device).T, zeros, order)


def _compressed(found: MatrixTensors) -> GroupedMatrix:
    """Read pack-quantized of compressed-tensors: a word has digits of one row, or zeros of one group down the rows."""
    found.expect(".weight_shape", (2,))
    rows, columns = (int(size) for size in found.read(".weight_shape", torch.int64))
    if rows < 1 or columns < 1:
        raise ModelError(
            f"{found.stem}.weight_shape is [{rows}, {columns}]; the checkpoint is damaged: download it again."
        )
    words = found.shape(".weight_packed")[1]
    bits = _bits(found, ".weight_packed", words, columns)
    found.expect(".weight_packed", (rows, words))
    blocks, groups, width = _by_rows_and_columns(found, ".weight_scale", rows, columns)
    found.expect(".weight_zero_point", (-(-rows * bits // 32), groups))
    found.expect(".weight_g_idx", (columns,))

    def zeros(device: torch.device) -> Tensor:
        words = found.read(".weight_zero_point", torch.int32, device).T
        return _unpacked(words, bits)[:, :rows].T

    if ".weight_g_idx" in found.tensors:
        order = _given_order(found, ".weight_g_idx", groups, columns)
    else:
        order = _in_order(found, ".weight_scale", groups, columns, width)
    scales = _scales(found, ".weight_scale")
    return GroupedMatrix(
        rows,
        columns,
        bits,
        lambda device: _unpacked(found.read(".weight_packed", torch.int32, device), bits)[:, :columns],
        lambda device: _spread(scales(device), rows, blocks, groups),
        zeros if ".weight_zero_point" in found.tensors else None,
        order,
    )


def _bytes(found: MatrixTensors) -> GroupedMatrix:
    """Read a byte per number, integer or fp8, in the matrix's shape; scales are per tensor, row, group or block."""
    digits = ".weight"
    rows, columns = found.shape(digits)
    scale = next(part for part in (".weight_scale_inv", ".weight_scale") if part in found.tensors)
    blocks, groups, width = _by_rows_and_columns(found, scale, rows, columns)
    is_integer = found.tensors[digits].type == "I8"
    dtype = torch.int8 if is_integer else torch.float8_e4m3fn
    zeros: Read | None = None
    if ".weight_zero_point" in found.tensors:
        found.expect(".weight_zero_point", found.tensors[scale].shape)

        def zeros(device: torch.device) -> Tensor:
            return _spread(found.read(".weight_zero_point", torch.int8, device), rows, blocks, groups)

    def read(device: torch.device) -> Tensor:
        given = found.read(digits, dtype, device)
        if not is_integer and bool((given.view(torch.uint8) & 127 == 127).any()):
            raise ModelError(
                f"{found.tensors[digits].name} has values that are not numbers; the checkpoint is damaged: download it "
                "again."
            )
        return given

    scales = _scales(found, scale)
    return GroupedMatrix(
        rows,
        columns,
        8,
        read,
        lambda device: _spread(scales(device), rows, blocks, groups),
        zeros,
        _in_order(found, scale, groups, columns, width),
        is_integer,
    )


def _by_rows_and_columns(found: MatrixTensors, part: str, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the rows with common scales, the groups of a row and their width, from the shape of the scales.

    Raises ModelError if the shape is not possible.
    """
    shape = found.tensors[part].shape
    if shape in ((), (1,), (1, 1)):
        return rows, 1, columns
    if shape == (rows,):
        return 1, 1, columns
    if len(shape) == 2 and shape[0] == rows and shape[1] and columns % shape[1] == 0:
        return 1, shape[1], columns // shape[1]
    if len(shape) == 2 and shape[0] == rows and ".weight_g_idx" in found.tensors and shape[1]:
        return 1, shape[1], -(-columns // shape[1])
    high, wide = min(found.scheme.block[0], rows), min(found.scheme.block[1], columns)
    blocks = -(-rows // high), -(-columns // wide)
    found.expect(part, (), (rows, 1), blocks)
    return high, blocks[1], wide


def _spread(scales: Tensor, rows: int, high: int, groups: int) -> Tensor:
    """Repeat the scales of blocks that are `high` rows each: -> [rows, groups]."""
    return scales.reshape(-1, groups).repeat_interleave(high, dim=0)[:rows]


UNPACK: Mapping[str, Callable[[MatrixTensors], GroupedMatrix]] = {
    AWQ.name: _awq,
    GPTQ.name: _gptq,
    PACKED.name: _compressed,
    INT8.name: _bytes,
    FP8.name: _bytes,
}
"""A reader for each layout, by name. It reads only what describes the layout; wrong shapes raise ModelError."""


def numbers(grouped: GroupedMatrix, device: torch.device = _CPU) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, fp32 [some rows, columns] on `device`), in order."""
    digits, scales = grouped.digits(device), grouped.scales(device)
    zeros = None if grouped.zeros is None else grouped.zeros(device)
    order = None if grouped.order is None else grouped.order.to(device)
    step = max(1, (_NEAR if device.type == "cpu" else _FAR) // grouped.columns)
    for start in range(0, grouped.rows, step):
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


def choose_blocks(grouped: GroupedMatrix) -> Kind | None:
    """Return the blocks that hold these numbers with no more rounding than bf16; None if no type can."""
    if grouped.order is not None or grouped.columns % _BLOCK or not grouped.is_integer:
        return None
    scales = grouped.scales(_CPU)
    if grouped.columns // scales.shape[1] % _BLOCK:
        return None
    if not halves_hold(scales, 16):
        return None
    if grouped.bits == 8:
        return Kind.Q8_0 if is_symmetric(grouped) else None
    return Kind.Q4_0 if is_symmetric(grouped) else Kind.Q4_1


def halves_hold(scales: Tensor, times: int) -> bool:
    """Return whether fp16 rounds scales no more than bf16 rounds numbers, and can hold `times` times each scale."""
    error = (scales.half().float() - scales).abs()
    return bool((error <= scales.abs() * 2**-9).all() and (times * scales).half().isfinite().all())


def is_symmetric(grouped: GroupedMatrix) -> bool:
    """Return whether all zero points are 0."""
    return grouped.zeros is None or not bool(grouped.zeros(_CPU).any())


def block_rows(grouped: GroupedMatrix, kind: Kind) -> Tensor:
    """Return the blocks of the type that `choose_blocks` chose, uint8 [rows, bytes per row]."""
    digits = grouped.digits(_CPU).reshape(grouped.rows, -1, _BLOCK)
    scales = grouped.scales(_CPU)
    times = digits.shape[1] // scales.shape[1]

    def each(values: Tensor) -> Tensor:
        return half_bytes(values.repeat_interleave(times, dim=1).unsqueeze(-1))

    parts = [each(scales)]
    if kind == Kind.Q4_1:
        assert grouped.zeros is not None
        parts.append(each(-scales * (grouped.zeros(_CPU).float() + 8)))
    parts.append(digits.view(torch.uint8) if kind == Kind.Q8_0 else pack_nibbles(digits + 8))
    return torch.cat(parts, dim=-1).view(grouped.rows, -1)
