"""Attention over the block table: one file per backend, one small protocol."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from engine.batch import StepBatch
from models.reference.attention import Attention

Write = Callable[[int, Tensor, Tensor], None]
"""(layer, k and v [T, Hkv, D]): writes the rows of a step into the cache."""


class AttentionBackend(Protocol):
    """Writes K and V of a step into the cache and attends over the block tables."""

    name: str

    def plan(self, batch: StepBatch) -> Attention:
        """Return what the model calls in this step, once per layer; work shared by all layers is done here."""


class RaggedBackend(AttentionBackend, Protocol):
    """A backend that reads on the device what to attend to, so that a CUDA graph can hold its launches."""

    def ragged(
        self, write: Write, q_ends: Tensor, k_ends: Tensor, tables: Sequence[Tensor], tokens: int, rows: int
    ) -> Attention:
        """Return the attention of spans of up to `tokens` tokens that see up to `rows` rows.

        The tokens of span i are those from q_ends[i] to q_ends[i + 1]; it sees k_ends[i + 1] - k_ends[i] rows, none if
        it has no tokens. A single span lies at the end of the step. Other tokens are padding, and their output is
        whatever was in memory. q_ends and k_ends int32 [spans + 1], tables int32 [spans, blocks] for each group of
        layers (`engine/cache/groups.py`).
        """
