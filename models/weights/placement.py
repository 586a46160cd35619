"""Which experts lie where: those that a device has no room for stay in host memory, whole layers of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from models.weights.block_formats import Kind
from models.weights.packing import packed_bytes
from models.weights.quantized import row_bytes
from models.weights.slots import Slot


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Bytes of the experts of a layer, as either memory would hold them."""

    layer: int
    on_device: int
    """Packed for its kernels where these read their type, and plain numbers else."""
    on_host: int
    """In blocks where they are stored so, and plain numbers else."""
    plain: int
    """As plain numbers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the experts go, and what that takes."""

    host_layers: frozenset[int] = frozenset()
    """Layers whose experts lie in host memory."""
    host_bytes: int = 0
    device_bytes: int = 0
    """Of all weights that are on the device, and of the buffers that experts are fetched to."""


def experts_of(
    slots: Iterable[Slot],
    dtype: torch.dtype,
    packed: Mapping[Slot, Kind],
    on_host: Mapping[Slot, Kind],
) -> list[LayerExperts]:
    """The layers with experts, in order; the matrices that a device holds packed, and those that host memory holds in
    blocks, are given with their types."""
    found: dict[int, tuple[int, int, int]] = {}
    for slot in slots:
        if slot.expert is None or slot.layer is None:
            continue
        plain = device = host = prod(slot.shape) * dtype.itemsize
        if slot in packed:
            device = packed_bytes(packed[slot], *slot.shape)
        if slot in on_host:
            host = slot.shape[0] * row_bytes(on_host[slot], slot.shape[1])
        before = found.get(slot.layer, (0, 0, 0))
        found[slot.layer] = before[0] + device, before[1] + host, before[2] + plain
    return [LayerExperts(layer, *sizes) for layer, sizes in found.items()]


def fetch_bytes(layers: Sequence[LayerExperts]) -> int:
    """What fetching experts from host memory takes on the device: a layer that is computed with and the next one, as
    they lie in host memory, and one in plain numbers where that is in blocks."""
    if not layers:
        return 0
    in_blocks = any(layer.on_host != layer.plain for layer in layers)
    plain = max(layer.plain for layer in layers) if in_blocks else 0
    return 2 * max(layer.on_host for layer in layers) + plain


def place_experts(needed: int, experts: Sequence[LayerExperts], room: int) -> Placement | None:
    """The last layers' experts go to host memory, as few as have the rest fit into `room` bytes of the device.

    `needed` are the bytes of all weights there. None: not even with all experts in host memory.
    """
    for count in range(len(experts) + 1):
        moved = experts[len(experts) - count :]
        device = needed - sum(layer.on_device for layer in moved) + fetch_bytes(moved)
        if device <= room:
            host = sum(layer.on_host for layer in moved)
            return Placement(frozenset(layer.layer for layer in moved), host, device)
    return None
