"""Grouped matrices as blocks to pack for a GPU (see packing.py): groups of 64 and 128, any column order, fp8.

    format   numbers  bytes  a block is
    INT4_64       64     36  f16 d, f16 m, u8 qs[32]    d * q + m
    INT4_128     128     68  f16 d, f16 m, u8 qs[64]    d * q + m
    INT8_32       32     36  f16 d, f16 m, i8 qs[32]    d * q + m
    FP8_128      128    132  f32 d, e4m3 qs[128]        d * q

Nibbles are laid out as in Q4_1: byte j holds number j in its low half and number j + block / 2 in its high half.
"""

from functools import partial

import torch
from torch import Tensor

from models.weights.block_formats import Kind
from models.weights.checkpoint import DeviceBlocks
from models.weights.formats.blocks import half_bytes, pack_nibbles
from models.weights.group_quant import GroupedMatrix, halves_hold, is_symmetric

_CPU = torch.device("cpu")


def device_blocks(grouped: GroupedMatrix) -> DeviceBlocks | None:
    """Return the blocks that hold these numbers with no more rounding than bf16, or None if no type can.

    Columns are put in the order of their groups.
    """
    scales, columns = grouped.scales(_CPU), grouped.columns
    if grouped.is_integer and not halves_hold(scales, 16 if grouped.bits == 4 else 128):
        return None
    groups, order = grouped.order, None
    if groups is None:
        groups = torch.arange(columns) // (columns // scales.shape[1])
    elif bool((groups.diff() < 0).any()):
        order = groups.argsort(stable=True)
        groups = groups[order]
    for kind in _kinds(grouped):
        if columns % kind.block == 0:
            each = groups.view(-1, kind.block)
            if bool((each == each[:, :1]).all()):
                return DeviceBlocks(kind, partial(_rows, grouped, kind, order, each[:, 0].clone()), order)
    return None


def _kinds(grouped: GroupedMatrix) -> tuple[Kind, ...]:
    """Return the types that may hold the matrix, widest groups first."""
    if not grouped.is_integer:
        return (Kind.FP8_128,)
    if grouped.bits == 4:
        return (Kind.INT4_128, Kind.INT4_64, Kind.Q4_0 if is_symmetric(grouped) else Kind.Q4_1)
    return (Kind.Q8_0 if is_symmetric(grouped) else Kind.INT8_32,)


def _rows(
    grouped: GroupedMatrix, kind: Kind, order: Tensor | None, groups: Tensor, device: torch.device
) -> Tensor:
    """Make the blocks, uint8 [rows, bytes per row], on `device`; `groups` has the group of each block of a row."""
    digits, groups = grouped.digits(device), groups.to(device)
    if not grouped.is_integer:
        digits = digits.view(torch.uint8)
    if order is not None:
        digits = digits[:, order.to(device)]
    digits = digits.reshape(grouped.rows, -1, kind.block)
    scales = grouped.scales(device)[:, groups].unsqueeze(-1)
    zero = 8 if grouped.bits == 4 else 0
    is_exact = kind == Kind.FP8_128
    parts = [scales.contiguous().view(torch.uint8) if is_exact else half_bytes(scales.contiguous())]
    if kind in (Kind.INT4_128, Kind.INT4_64, Kind.INT8_32, Kind.Q4_1):
        zeros = 0 if grouped.zeros is None else grouped.zeros(device)[:, groups].unsqueeze(-1).float()
        parts.append(half_bytes(-scales * (zeros + zero)))
    parts.append(pack_nibbles(digits + zero) if zero else digits.view(torch.uint8))
    return torch.cat(parts, dim=-1).view(grouped.rows, -1)
