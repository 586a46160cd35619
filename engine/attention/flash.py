"""Attention by the flash-attn package (an optional extra): bf16 or fp16 on GPUs from compute capability 8.0 on.

Written against flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention.parts import SpanRows, block_tables, span_slots
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention

Kernel = Callable[..., Tensor]
Write = Callable[[int, Tensor, Tensor], None]
"""(layer, k and v [T, Hkv, D]): puts the rows of a step into the cache."""

PAGE = 256
"""Its paged kernels take blocks of a multiple of this."""
FEW = 8
"""Up to so many tokens the rows are worth splitting among programs, which only `attend` does."""
MANY = 512
"""From so many tokens on, it takes longer over blocks than bringing scattered ones together first."""


class FlashBackend:
    """A long span reads a view of contiguous blocks, or a copy of many; everything else goes through block tables.

    Its plain twin is `SdpaBackend`.
    """

    name = "flash"

    def __init__(self, cache: KVCache) -> None:
        """Raises ValueError for blocks that it cannot page, and whatever importing a broken package raises."""
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        if cache.block_size % PAGE:
            raise ValueError(f"flash-attn needs blocks of a multiple of {PAGE} rows, not {cache.block_size}")
        self._cache = cache
        self.attend: Kernel = flash_attn_with_kvcache
        # This one is wrapped in autograd and operator dispatch, as the package's others are: 0.3 ms a call.
        self._attend_ragged: Kernel = flash_attn_varlen_func

    def plan(self, batch: StepBatch) -> Attention:
        """See `AttentionBackend`."""
        spans, counts = batch.spans, [span.count for span in batch.spans]
        if len(spans) == 1 and self._is_whole(spans[0]):
            return _Whole(self._cache, self.attend, spans[0])
        if len(spans) == 1 or max(counts) == min(counts) <= FEW:
            return _Paged(self._cache, self.attend, spans)
        stops = [span.stop for span in spans]
        ends = torch.tensor([[0, *accumulate(counts)], [0, *accumulate(stops)]], dtype=torch.int32)
        q_ends, k_ends = ends.to(self._cache.kv.device, non_blocking=True)
        write = _Write(self._cache, spans)
        tables = block_tables(self._cache, spans)
        return self.ragged(write, q_ends, k_ends, tables, max(counts), max(stops))

    def ragged(
        self, write: Write, q_ends: Tensor, k_ends: Tensor, tables: Tensor, tokens: int, rows: int
    ) -> "Ragged":
        """Attention of spans of up to `tokens` tokens that see up to `rows` rows; the tensors are those of `Ragged`."""
        return Ragged(self._cache, self._attend_ragged, write, q_ends, k_ends, tables, tokens, rows)

    def _is_whole(self, span: Span) -> bool:
        one_run = span.count > FEW and len(self._cache.slots(span.blocks, 0, span.stop)) == 1
        return one_run or span.count >= MANY


class _Whole:
    """One span over all rows side by side."""

    def __init__(self, cache: KVCache, attend: Kernel, span: Span) -> None:
        self._rows = SpanRows(cache, span)
        self._attend = attend

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._rows.write(layer_index, k, v)
        seen = (x.unsqueeze(0) for x in self._rows.read(layer_index))
        # Causal here means aligned at the right corner: the last query sees the last row.
        return self._attend(q.unsqueeze(0), *seen, causal=True).squeeze(0)


class _Paged:
    """Spans of the same number of tokens; the kernel writes their K and V too."""

    def __init__(self, cache: KVCache, attend: Kernel, spans: tuple[Span, ...]) -> None:
        self._cache = cache
        self._attend = attend
        self._shape = (len(spans), spans[0].count)
        self._tables = block_tables(cache, spans)
        starts = torch.tensor([span.start for span in spans], dtype=torch.int32)
        self._starts = starts.to(cache.kv.device, non_blocking=True)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = (-1, self._cache.block_size, *k.shape[1:])
        out = self._attend(
            q.view(*self._shape, *q.shape[1:]),
            self._cache.k[layer_index].view(pages),
            self._cache.v[layer_index].view(pages),
            k=k.view(*self._shape, *k.shape[1:]),
            v=v.view(*self._shape, *v.shape[1:]),
            cache_seqlens=self._starts,
            block_table=self._tables,
            causal=True,
        )
        return out.flatten(0, 1)


class _Write:
    """Writes K and V of spans into the cache."""

    def __init__(self, cache: KVCache, spans: tuple[Span, ...]) -> None:
        self._cache = cache
        self._slots = span_slots(cache, spans)

    def __call__(self, layer_index: int, k: Tensor, v: Tensor) -> None:
        self._cache.k[layer_index].index_copy_(0, self._slots, k)
        self._cache.v[layer_index].index_copy_(0, self._slots, v)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Spans of any numbers of tokens in one call. Implements `models.reference.attention.Attention`.

    The tokens of span i are those from q_ends[i] to q_ends[i + 1]; those after the last are padding, whose output is
    whatever lay in memory. It sees k_ends[i + 1] - k_ends[i] rows. A span without tokens has neither.
    """

    cache: KVCache
    attend: Kernel
    write: Write
    q_ends: Tensor
    """int32 [spans + 1]"""
    k_ends: Tensor
    """int32 [spans + 1]"""
    tables: Tensor
    """int32 [spans, blocks]"""
    most_tokens: int
    most_rows: int

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        self.write(layer_index, k, v)
        pages = (-1, self.cache.block_size, *k.shape[1:])
        return self.attend(
            q,
            self.cache.k[layer_index].view(pages),
            self.cache.v[layer_index].view(pages),
            self.q_ends,
            self.k_ends,
            max(self.most_tokens, 2),  # one alone it would take for a batch without padding
            self.most_rows,
            causal=True,
            block_table=self.tables,
        )
