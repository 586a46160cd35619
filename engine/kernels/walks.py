"""What kernels of recurrences read about the spans of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.recurrences import DeltaNet


@dataclass(frozen=True, slots=True)
class Walks:
    """The rows of all spans that are walked over, one span after the other, and what happens on the way."""

    places: Tensor
    """int32 [rows, conv_width]: where each row finds the rows up to itself, the oldest first. From 0 on it is a slot of
    the log, NONE if there is no such row, and below that -2 minus the number of a row of the step."""
    spans: Tensor
    """int32 [spans, 8]: the first row; the first whose output is wanted; the end; what is taken from the number of a
    row for that of its output; the slot of the state before the first row, or NONE; the first save and their end."""
    saves: Tensor
    """int32 [saves, 2]: before which row the state is written, and to which slot."""


def delta_inputs(spec: DeltaNet, count: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return room for what gated delta nets read of `count` rows with the dtype and device of `rows`: queries and keys,
    each fp32 [count, key_heads, padded_key_dim], values [count, value_heads, value_dim] in that dtype, and factors and
    betas, each fp32 [count, value_heads]."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((count, *shape), dtype=dtype, device=rows.device)

    keys = spec.key_heads, padded_key_dim(spec)
    values = empty(spec.value_heads, spec.value_dim, dtype=rows.dtype)
    return empty(*keys), empty(*keys), values, empty(spec.value_heads), empty(spec.value_heads)


def padded_key_dim(spec: DeltaNet) -> int:
    """Return the size of keys rounded up to a power of two from 8 on."""
    return max(1 << (spec.key_dim - 1).bit_length(), 8)
