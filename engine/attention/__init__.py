"""Attention over the block table: one file per backend, one small protocol."""

from typing import Protocol

from engine.batch import StepBatch
from models.reference.attention import Attention


class AttentionBackend(Protocol):
    """Writes K and V of a step into the cache and attends over the block tables."""

    name: str

    def plan(self, batch: StepBatch) -> Attention:
        """What the model calls in this step, once a layer: everything all layers share is computed here."""
