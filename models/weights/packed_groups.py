"""Choosing the matrices of a checkpoint that stay quantised on a GPU, and packing them there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor

from models.units import bytes_text
from models.weights.block_formats import Kind
from models.weights.checkpoint import FLOATS, StoredTensor
from models.weights.formats.blocks import BLOCKS, ROWS
from models.weights.packing import Planes, empty_planes, pack, slabs
from models.weights.quantize import choose_kinds, quantize
from models.weights.slots import Slot
from models.weights.staging import Extent


def choose_packed(
    tensors: Sequence[StoredTensor], places: Mapping[str, Slot], quantize: str = "auto"
) -> dict[str, Kind]:
    """Return the type of every matrix that is quantised on a GPU, by name.

    A matrix is included only if all parts of its layer have types that kernels read; gate and up must have the same
    type, and so must all experts of a layer. `quantize` is one of models.weights.quantize.QUANTIZE except "none":
    "auto" keeps the types of the file, the others quantise plain matrices. Raises ModelError for what cannot be done.
    """
    becomes = choose_kinds(tensors, places, quantize, torch.device("cpu")) if quantize != "auto" else None
    groups: dict[str, list[_Part]] = {}
    for tensor in tensors:
        slot = places.get(tensor.name)
        if slot is None or not (slot.is_matrix or slot.is_by_head):
            continue
        held = tensor.on_device if tensor.on_device is not None and slot.expert is None else tensor.blocks
        kind = held.kind if held is not None else None
        kind = kind if becomes is None else becomes.get(tensor.name)
        groups.setdefault(slot.group, []).append((tensor, slot, kind))
    return {
        tensor.name: kind
        for parts in groups.values()
        if _fits(parts)
        for tensor, _, kind in parts
        if kind is not None
    }


_Part = tuple[StoredTensor, Slot, Kind | None]
"""A part of a layer, and the type that it has, or gets, on a GPU."""


def _fits(parts: list[_Part]) -> bool:
    kinds = {kind for _, _, kind in parts}
    *before, last = sorted((slot for _, slot, _ in parts), key=lambda slot: slot.start)
    if last.expert is not None:  # another expert follows
        before.append(last)
    if any(kind not in BLOCKS for kind in kinds) or any(slot.rows % ROWS for slot in before):
        return False
    if last.expert is not None:
        return len(kinds) == 1
    orders = [tensor.on_device.order if tensor.on_device is not None else None for tensor, _, _ in parts]
    alike = len(kinds) == 1 and all(_same(order, orders[0]) for order in orders)
    return alike or not last.group.endswith("gate_up.weight")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two matrices have their columns in the same order."""
    return torch.equal(one, other) if one is not None and other is not None else one is other


def expansion_note(
    tensors: Iterable[StoredTensor],
    places: Mapping[str, Slot],
    packed: Mapping[str, Kind] | None,
    dtype: torch.dtype,
) -> str | None:
    """Return a line for the user about matrices of a quantised file that a GPU holds as plain numbers, or None.

    `packed` has the matrices that stay quantised; None: no kernels here read any.
    """
    found: dict[str, set[str]] = {}
    stored = held = 0
    for tensor in tensors:
        slot = places.get(tensor.name)
        if slot is not None and tensor.blocks and not tensor.quantized and tensor.name not in (packed or {}):
            part = "experts" if slot.expert is not None else slot.part
            found.setdefault(part, set()).add(tensor.blocks.kind.name)
            stored += tensor.nbytes
            held += slot.rows * slot.shape[1] * dtype.itemsize
    if not found:
        return None
    sizes = f"expanded from {bytes_text(stored)} to {bytes_text(held)}"
    if packed is None:
        names = ", ".join(sorted(set().union(*found.values())))
        return f"The weights of this file ({names}) are {sizes}: no kernels here read them as they are."
    what = ", ".join(f"{part} ({', '.join(sorted(names))})" for part, names in found.items())
    return f"There are no GPU kernels for the format of some weights in this file: {what}. They are {sizes}."


def fill_planes(planes: Planes, tensor: StoredTensor) -> None:
    """Read a tensor and pack it. Raises ModelError if the file cannot be read."""
    held = (tensor.on_device, tensor.blocks)
    stored = next((blocks for blocks in held if blocks is not None and blocks.kind == planes.kind), None)
    if stored is not None:
        pack(stored.rows(planes.scales.device), planes)
    else:
        numbers = _plain(planes, tensor)
        tensor.copy_into(numbers)
        _quantize_into(planes, numbers)


def stream_planes(planes: Planes, tensor: StoredTensor, extent: Extent) -> tuple[Extent, Tensor]:
    """Return the extent and the target that bring its bytes to the device, to be packed once all have arrived."""
    if tensor.blocks is None:
        return replace(extent, finish=partial(_quantize_into, planes)), _plain(planes, tensor)
    raw = torch.empty(
        planes.rows, extent.nbytes // planes.rows, dtype=torch.uint8, device=planes.scales.device
    )
    finish = partial(pack, out=planes)
    return replace(extent, numbers=extent.nbytes, decode=lambda staged: staged, finish=finish), raw


def _plain(planes: Planes, tensor: StoredTensor) -> Tensor:
    """Allocate memory for plain numbers in the dtype of the file."""
    dtype = FLOATS.get(tensor.type, torch.float32)
    return torch.empty(planes.rows, planes.columns, dtype=dtype, device=planes.scales.device)


def _quantize_into(planes: Planes, numbers: Tensor) -> None:
    """Quantise numbers [rows, columns] on the device and pack them, some rows at a time."""
    for part, rows in slabs(planes, numbers):
        pack(quantize(rows.float(), planes.kind), part)


Weights = dict[tuple[int | None, int], Planes]
"""The weights of a layer by (expert or None, first row)."""


def packed_weights(
    parts: Sequence[tuple[Slot, Kind]],
    device: torch.device,
    orders: Mapping[Slot, Tensor | None] = MappingProxyType({}),
) -> tuple[Weights, dict[Slot, Planes]]:
    """Allocate memory for the parts of a layer. Return its weights, and the place of each part.

    Neighbouring parts with the same type and column order form one weight. Experts, which have the same type, lie one
    behind the other.
    """
    weights: Weights = {}
    places: dict[Slot, Planes] = {}
    runs: list[list[tuple[Slot, Kind]]] = []
    for slot, kind in sorted(parts, key=lambda part: (part[0].expert or 0, part[0].start)):
        before = runs[-1][0] if runs else None
        if before is not None and before[1] == kind and _same(orders.get(before[0]), orders.get(slot)):
            runs[-1].append((slot, kind))
        else:
            runs.append([(slot, kind)])
    for run in runs:
        first, kind = run[0]
        planes = empty_planes(kind, sum(slot.rows for slot, _ in run), first.shape[1], device)
        if (order := orders.get(first)) is not None:
            planes = replace(planes, order=order.to(device, torch.int32))
        at = 0
        for expert, found in groupby((slot for slot, _ in run), key=lambda slot: slot.expert):
            own, start = list(found), at
            for slot in own:
                places[slot] = planes.cut(at, slot.rows)
                at += slot.rows
            weights[expert, own[0].start] = planes.cut(start, at - start)
    return weights, places
