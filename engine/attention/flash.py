"""Attention by the flash-attn package (an optional extra): bf16 or fp16 on GPUs from compute capability 8.0 on.

Written against flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention.parts import Parts, SpanRows, block_tables, runs
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention

Kernel = Callable[..., Tensor]

PAGE = 256
"""Its paged kernel takes blocks of a multiple of this."""
FEW = 8
"""Up to so many tokens the rows are worth splitting among programs, which only the paged kernel does well."""
MANY = 512
"""From so many tokens on, the paged kernel takes longer than bringing scattered blocks together and the other one."""


class FlashBackend:
    """Long spans read a view of contiguous blocks, or a copy of many; everything else goes through the paged kernel.

    Its plain twin is `SdpaBackend`.
    """

    name = "flash"

    def __init__(self, cache: KVCache) -> None:
        """Raises ValueError for blocks that it cannot page, and whatever importing a broken package raises."""
        from flash_attn import flash_attn_with_kvcache

        if cache.block_size % PAGE:
            raise ValueError(f"flash-attn needs blocks of a multiple of {PAGE} rows, not {cache.block_size}")
        self._cache = cache
        # The package's other functions are wrapped in autograd and operator dispatch: 0.3 ms a call.
        self.attend: Kernel = flash_attn_with_kvcache

    def plan(self, batch: StepBatch) -> Attention:
        """See `AttentionBackend`."""
        # Whole spans are parts of their own; of the others those of the same length side by side are one.
        whole = [at if self._is_whole(span) else None for at, span in enumerate(batch.spans)]
        kinds = [(at, span.count) for at, span in zip(whole, batch.spans, strict=True)]
        return Parts(
            [
                (tokens, (_Paged if at is None else _Whole)(self._cache, self.attend, spans))
                for (at, _), tokens, spans in runs(batch, kinds)
            ]
        )

    def _is_whole(self, span: Span) -> bool:
        one_run = span.count > FEW and len(self._cache.slots(span.blocks, 0, span.stop)) == 1
        return one_run or span.count >= MANY


class _Whole:
    """One span over all rows side by side."""

    def __init__(self, cache: KVCache, attend: Kernel, spans: tuple[Span, ...]) -> None:
        (span,) = spans
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
