"""Placement of experts: those that do not fit on the device stay in host memory, whole layers at a time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from models.weights.block_formats import Kind
from models.weights.packing import packed_bytes
from models.weights.slots import Slot


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Bytes of the experts of a layer, in device memory or in host memory."""

    layer: int
    on_device: int
    """Packed if GPU kernels read their type, otherwise as plain numbers."""
    on_host: int
    """In blocks if they are stored in blocks, otherwise as plain numbers."""
    plain: int
    """As plain numbers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the experts go, and how much memory that takes."""

    host_layers: frozenset[int] = frozenset()
    """The layers whose experts lie in host memory."""
    host_bytes: int = 0
    device_bytes: int = 0
    """Bytes of all weights on the device, and of the buffers for fetched experts."""


def expert_layers(
    slots: Iterable[Slot], dtype: torch.dtype, packed: Mapping[Slot, Kind], on_host: Mapping[Slot, Kind]
) -> list[LayerExperts]:
    """Return the layers with experts, in order. `packed` and `on_host` have the types of the matrices that the device
    holds packed and that host memory holds in blocks."""
    found: dict[int, tuple[int, int, int]] = {}
    for slot in slots:
        if slot.expert is None or slot.layer is None:
            continue
        plain = device = host = prod(slot.shape) * dtype.itemsize
        if slot in packed:
            device = packed_bytes(packed[slot], *slot.shape)
        if slot in on_host:
            host = slot.shape[0] * on_host[slot].row_bytes(slot.shape[1])
        before = found.get(slot.layer, (0, 0, 0))
        found[slot.layer] = before[0] + device, before[1] + host, before[2] + plain
    return [LayerExperts(layer, *sizes) for layer, sizes in found.items()]


def fetch_bytes(layers: Sequence[LayerExperts]) -> int:
    """Return the bytes of device memory that fetching experts takes: the layer being computed and the next one, as they
    lie in host memory, and one layer in plain numbers if they lie there in blocks."""
    if not layers:
        return 0
    in_blocks = any(layer.on_host != layer.plain for layer in layers)
    plain = max(layer.plain for layer in layers) if in_blocks else 0
    return 2 * max(layer.on_host for layer in layers) + plain


def place_experts(needed: int, experts: Sequence[LayerExperts], room: int) -> Placement | None:
    """Move the experts of the last layers to host memory, as few as make the rest fit into `room` bytes of the device.

    `needed` is the bytes of all weights on the device. Return None if not even moving all experts suffices.
    """
    for count in range(len(experts) + 1):
        moved = experts[len(experts) - count :]
        device = needed - sum(layer.on_device for layer in moved) + fetch_bytes(moved)
        if device <= room:
            host = sum(layer.on_host for layer in moved)
            return Placement(frozenset(layer.layer for layer in moved), host, device)
    return None
