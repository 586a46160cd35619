"""A step whose spans are computed in different ways."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from engine.batch import Span, StepBatch
from models.reference.attention import Attention

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Parts:
    """Runs the tokens of each part through the part's own attention."""

    parts: list[tuple[slice, Attention]]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        if len(self.parts) == 1:
            return self.parts[0][1](layer_index, q, k, v)
        return torch.cat([attend(layer_index, q[at], k[at], v[at]) for at, attend in self.parts])


def runs(batch: StepBatch, kinds: list[Kind]) -> Iterator[tuple[Kind, slice, tuple[Span, ...]]]:
    """Spans side by side that have the same kind: their kind, their tokens in the step, and they themselves."""
    token = 0
    for kind, pairs in groupby(zip(kinds, batch.spans, strict=True), key=lambda pair: pair[0]):
        spans = tuple(span for _, span in pairs)
        count = sum(span.count for span in spans)
        yield kind, slice(token, token + count), spans
        token += count
