"""Copies experts in host memory to the GPU for the tokens of a long chunk, one layer after the other.

    copies    | layer 0 | layer 1 |  . . .  | layer 2 |  . . .  | layer 3 | ...
    compute   |   ...   | layer 0 |   ...   | layer 1 |   ...   | layer 2 | ...

The GPU has room for two layers in the format of host memory. Quantised experts are expanded there into one more buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from models.network import ExpertWeights, FeedForwardWeights, Linear, Weight
from models.weights.formats.blocks import dequantize

EXPANDED = 1 << 23
"""How many numbers of quantised experts are expanded at once; EXPANDING_BYTES covers the memory that this takes."""
_ALIGNED = 256


def stacked(weights: Sequence[Weight]) -> Tensor:
    """Return the tensor [experts, ...] of which the weights of a layer's experts are views; see `ExpertWeights`."""
    first = weights[0].data
    return first.as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))


def stacks(weights: ExpertWeights) -> list[Tensor]:
    """Return the memory of a layer's experts: gate and up, in one tensor or two, and down."""
    found = []
    for linears in _sides(weights):
        found += [
            stacked([linear.parts[part] for linear in linears]) for part in range(len(linears[0].parts))
        ]
    return found


def _sides(weights: ExpertWeights) -> tuple[list[Linear], list[Linear]]:
    return [expert.gate_up for expert in weights.experts], [expert.down for expert in weights.experts]


def _biases(linears: list[Linear], device: torch.device) -> Tensor | None:
    """Return the first expert's bias, followed in memory by those of the others."""
    found = [linear.bias for linear in linears if linear.bias is not None]
    return torch.stack(found).to(device)[0] if found else None


@dataclass(slots=True)
class _Slot:
    """Device memory for one layer, and the events of its arrival and release."""

    memory: Tensor
    arrived: torch.cuda.Event | None
    free: torch.cuda.Event | None


class FetchedExperts:
    """The experts of some layers, each on the device only while it is used. It works in recordings, too."""

    def __init__(self, layers: Mapping[int, ExpertWeights], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the device memory. Raises the error of torch if there is not enough."""
        self._layers = layers
        self._order = list(layers)
        self._sources = {layer: stacks(weights) for layer, weights in layers.items()}
        most = max(sum(map(_room, sources)) for sources in self._sources.values())
        is_cuda = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

        def event() -> torch.cuda.Event | None:
            return torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

        self._slots = [
            _Slot(torch.empty(most, dtype=torch.uint8, device=device), event(), event()) for _ in range(2)
        ]
        self._copied = 0
        first = next(iter(layers.values())).experts
        # Biases are small and stay on the device.
        self._biases = {
            layer: [_biases(linears, device) for linears in _sides(weights)]
            for layer, weights in layers.items()
        }
        self._plain: list[Tensor] = []
        """The expanded gate and up, and down, of a layer: [experts, rows, columns]."""
        if not first[0].gate_up.is_plain:
            self._plain = [
                torch.empty(len(first), linear.rows, linear.columns, dtype=dtype, device=device)
                for linear in (first[0].gate_up, first[0].down)
            ]

    def begin(self) -> None:
        """Start copying for a chunk. It must then `take` every layer once, in order."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        self._copied = 0
        self._copy()
        self._copy()

    def take(self, layer: int) -> ExpertWeights:
        """Return the layer with the first of its experts on the device; the others follow it in memory."""
        slot, weights = self._slots[self._order.index(layer) % 2], self._layers[layer]
        if slot.arrived is not None:
            torch.cuda.current_stream().wait_event(slot.arrived)
        parts = _views(slot.memory, self._sources[layer])
        if self._plain:
            first = weights.experts[0]
            count = len(first.gate_up.parts)
            _expand(parts[:count], first.gate_up, self._plain[0])
            _expand(parts[count:], first.down, self._plain[1])
            parts = self._plain
        gate_up, down = (
            Linear((Weight.plain(part[0]),), bias)
            for part, bias in zip(parts, self._biases[layer], strict=True)
        )
        return replace(weights, experts=(FeedForwardWeights(gate_up, down),), on_host=False)

    def give_back(self, layer: int) -> None:
        """Release the layer once its computation is enqueued, so that the layer after the next can take its place."""
        slot = self._slots[self._order.index(layer) % 2]
        if self._copies is not None and slot.free is not None:
            slot.free.record()
            self._copies.wait_event(slot.free)
        self._copy()

    def _copy(self) -> None:
        if self._copied == len(self._order):
            return
        slot, sources = self._slots[self._copied % 2], self._sources[self._order[self._copied]]
        self._copied += 1
        with torch.cuda.stream(self._copies):  # does nothing without a stream
            for source, target in zip(sources, _views(slot.memory, sources), strict=True):
                target.copy_(source, non_blocking=True)
            if slot.arrived is not None:
                slot.arrived.record()


def _room(part: Tensor) -> int:
    return -(-part.nbytes // _ALIGNED) * _ALIGNED


def _views(memory: Tensor, sources: Sequence[Tensor]) -> list[Tensor]:
    """Return where in `memory` each source goes, in its shape."""
    starts = accumulate(map(_room, sources), initial=0)
    return [
        memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
        for start, source in zip(starts, sources, strict=False)
    ]


def _expand(blocks: Sequence[Tensor], linear: Linear, out: Tensor) -> None:
    """Expand each part's blocks, uint8 [experts, rows, bytes a row], into out [experts, all rows, columns]."""
    first = 0
    for part, data in zip(linear.parts, blocks, strict=True):
        some = max(1, EXPANDED // (part.rows * part.columns))
        for start in range(0, len(data), some):
            packed = data[start : start + some]
            numbers = torch.empty(packed[..., 0].numel(), part.columns, device=out.device)
            dequantize(packed.reshape(len(numbers), -1), part.format, numbers)
            target = out[start : start + some, first : first + part.rows]
            target.copy_(numbers.view(target.shape))
        first += part.rows
