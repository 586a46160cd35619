"""What kernels of recurrences read about the spans of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.recurrences import DeltaNet, Recurrence


@dataclass(frozen=True, slots=True)
class Walks:
    """The rows of all spans that are walked over, one span after the other, and what happens on the way."""

    places: Tensor
    """int32 [rows, conv_width]: where each row finds the rows up to itself, the oldest first. From 0 on it is a slot of
    the log, NONE if there is no such row, and below that -2 minus the number of a row of the step."""
    slots: Tensor
    """int32 [rows of the step]: where each is written in the log."""
    spans: Tensor
    """int32 [spans, 8]: the first row; the first whose output is wanted; the end; what is taken from the number of a
    row for that of its output; the slot of the state before the first row, or NONE; the first save and their end."""
    saves: Tensor
    """int32 [saves, 2]: before which row the state is written, and to which slot."""
    is_padded: bool = False
    """Whether there may be rows of the step that no span has. Their outputs are zeros."""


def walk_inputs(spec: Recurrence, count: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return room for what the recurrence reads of `count` rows with the dtype and device of `rows`: queries and keys,
    each fp32 [count, key heads, padded keys], values [count, heads, value_dim] in that dtype, and factors and betas,
    each fp32 [count, heads]."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((count, *shape), dtype=dtype, device=rows.device)

    shape = walk_shape(spec)
    keys = shape.key_heads, shape.padded_keys
    values = empty(shape.heads, shape.values, dtype=rows.dtype)
    return empty(*keys), empty(*keys), values, empty(shape.heads), empty(shape.heads)


@dataclass(frozen=True, slots=True)
class WalkShape:
    """The sizes of a recurrence in the words of gated delta nets."""

    key_heads: int
    heads: int
    keys: int
    values: int

    @property
    def padded_keys(self) -> int:
        """The size of keys rounded up to a power of two from 8 on."""
        return max(1 << (self.keys - 1).bit_length(), 8)


def walk_shape(spec: Recurrence) -> WalkShape:
    """Return the sizes of a recurrence: B and C of Mamba-2 are keys and queries, x has the values."""
    if isinstance(spec, DeltaNet):
        return WalkShape(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
    return WalkShape(spec.groups, spec.heads, spec.state_size, spec.head_dim)
