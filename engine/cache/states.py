"""The tensors of the states of recurrent layers; `engine/cache/marks.py` says what lies in their slots."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from models.recurrences import Recurrence
from models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class States:
    """The states of each recurrent layer, by its index: fp32 [slots, *state_shape]."""

    layers: dict[int, Tensor]
    slots: int
    tail: int
    """How many rows before a row its recurrence reads."""

    @property
    def nbytes(self) -> int:
        """The size of all states in bytes."""
        return sum(states.nbytes for states in self.layers.values())

    def read(self, layer: int, slot: int) -> Tensor:
        """Return the state of a layer in a slot, or zeros for NONE."""
        states = self.layers[layer]
        return states[slot] if slot >= 0 else torch.zeros_like(states[0])


def state_sizes(spec: ModelSpec) -> dict[int, int]:
    """Return the bytes of one state of each recurrent layer, by its index."""
    return {
        index: 4 * prod(layer.mixer.state_shape)
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.mixer, Recurrence)
    }


def make_states(spec: ModelSpec, slots: int, device: torch.device) -> States | None:
    """Return the states of a network; None if it has no recurrent layers. Raises what torch raises without memory."""
    layers, tail = {}, 0
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, Recurrence):
            layers[index] = torch.empty((slots, *layer.mixer.state_shape), dtype=torch.float32, device=device)
            tail = max(tail, layer.mixer.conv_width - 1)
    return States(layers, slots, tail) if layers else None
