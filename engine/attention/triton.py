"""Attention of a few tokens by our own Triton kernel over the block table; more tokens go through torch's."""

import torch
from torch import Tensor

from engine.attention.parts import Parts, runs
from engine.attention.sdpa import SdpaBackend
from engine.batch import Batch, Span
from engine.kv_cache import KVCache
from models.attention import Attention

FEW = 8
"""The longest span that the kernel takes."""


class TritonBackend:
    """Decode and verification of up to 8 tokens a span. Its plain twin is `SdpaBackend`, for longer spans too.

    Raises ImportError where triton is not installed.
    """

    name = "triton"

    def __init__(self, cache: KVCache, groups: int) -> None:
        """`groups` is the number of query heads for each KV head."""
        import engine.kernels.paged_attention  # noqa: F401 - now, rather than in the first step

        self._cache = cache
        self._long = SdpaBackend(cache, groups)

    def plan(self, batch: Batch) -> Attention:
        """See `AttentionBackend`."""
        few = [span.count <= FEW for span in batch.spans]
        return Parts(
            [
                (tokens, _PagedStep(self._cache, spans) if short else self._long.plan(Batch(spans)))
                for short, tokens, spans in runs(batch, few)
            ]
        )


class _PagedStep:
    """Spans of a few tokens each, all in one launch."""

    def __init__(self, cache: KVCache, spans: tuple[Span, ...]) -> None:
        self._cache = cache
        self._most_tokens = max(span.count for span in spans)
        self._most_rows = max(span.stop for span in spans)
        size, device = cache.block_size, cache.kv.device
        tables = [span.blocks[: -(-span.stop // size)] for span in spans]
        longest = max(map(len, tables))
        slots, table, token = [], [], 0
        places = []
        for span, blocks in zip(spans, tables, strict=True):
            rows = range(span.start, span.stop)
            slots += [blocks[row // size] * size + row % size for row in rows]
            places.append((token, span.start, span.count))
            table.append(blocks + (0,) * (longest - len(blocks)))
            token += span.count
        self._slots = torch.tensor(slots).to(device, non_blocking=True)
        self._spans = torch.tensor(places, dtype=torch.int32).to(device, non_blocking=True)
        self._tables = torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from engine.kernels.paged_attention import paged_attention

        keys, values = self._cache.k[layer_index], self._cache.v[layer_index]
        keys.index_copy_(0, self._slots, k)
        values.index_copy_(0, self._slots, v)
        return paged_attention(
            q,
            keys,
            values,
            self._spans,
            self._tables,
            block_size=self._cache.block_size,
            most_tokens=self._most_tokens,
            most_rows=self._most_rows,
        )
