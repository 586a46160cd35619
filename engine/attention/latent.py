"""The rows of a step's spans that latent attention sees, read from the KV cache."""

from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from engine.attention.convolving import ConvolvingStep
from engine.attention.parts import SpanRows, span_slots


class LatentStep(ConvolvingStep):
    """The attention of one step for a network some of whose layers have latent attention (`LatentRows`)."""

    def latent_rows(self, layer_index: int, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See `models.reference.attention.LatentRows`."""
        self.cache.keep(layer_index, self._own, rows)
        for span, seen in zip(self._spans, self._seen_by_span, strict=True):
            yield span.count, seen.kept(layer_index)

    @cached_property
    def _own(self) -> Tensor:
        """The slots of the step's rows, int64 [T]."""
        return span_slots(self.cache, self._spans)

    @cached_property
    def _seen_by_span(self) -> list[SpanRows]:
        return [SpanRows(self.cache, span) for span in self._spans]
