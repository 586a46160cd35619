"""Attention of a few tokens by our own Triton kernel over the block table; more tokens go through torch's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.parts import Parts, block_tables, places, runs, span_slots
from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention

FEW = 8
"""The longest span that the kernel takes."""


class TritonBackend:
    """Decode and verification of up to 8 tokens a span. Its plain twin is `SdpaBackend`, for longer spans too.

    Raises ImportError where triton is not installed.
    """

    name = "triton"

    def __init__(self, cache: KVCache, groups: int) -> None:
        """`groups` is the number of query heads for each KV head."""
        import engine.kernels.triton.paged_attention  # noqa: F401 - now, rather than in the first step

        self._cache = cache
        self._long = SdpaBackend(cache, groups)

    def plan(self, batch: StepBatch) -> Attention:
        """See `AttentionBackend`."""
        few = [span.count <= FEW for span in batch.spans]
        return Parts(
            [
                (tokens, _paged_step(self._cache, spans) if short else self._long.plan(StepBatch(spans)))
                for short, tokens, spans in runs(batch, few)
            ]
        )


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A few tokens of one or several sequences, in one launch. Implements `models.reference.attention.Attention`."""

    cache: KVCache
    slots: Tensor
    """int64 [T]: where the K and V of the step's tokens go."""
    spans: Tensor
    """int32 [n, 3]: see `paged_attention`."""
    tables: Tensor
    """int32 [n, blocks]"""
    most_tokens: int
    most_rows: int

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        from engine.kernels.triton.paged_attention import paged_attention

        keys, values = self.cache.k[layer_index], self.cache.v[layer_index]
        keys.index_copy_(0, self.slots, k)
        values.index_copy_(0, self.slots, v)
        return paged_attention(
            q,
            keys,
            values,
            self.spans,
            self.tables,
            block_size=self.cache.block_size,
            most_tokens=self.most_tokens,
            most_rows=self.most_rows,
        )


def _paged_step(cache: KVCache, spans: tuple[Span, ...]) -> PagedStep:
    device = cache.kv.device
    given = [(tokens.start, span.start, span.count) for tokens, span in places(StepBatch(spans))]
    return PagedStep(
        cache,
        span_slots(cache, spans),
        torch.tensor(given, dtype=torch.int32).to(device, non_blocking=True),
        block_tables(cache, spans),
        most_tokens=max(span.count for span in spans),
        most_rows=max(span.stop for span in spans),
    )
