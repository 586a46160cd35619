"""Attention by the flash-attn package (an optional extra): bf16 or fp16 on GPUs from compute capability 8.0 on.

Written against flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention.parts import Parts, runs
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
        kinds = [(self._how(span), span.count) for span in batch.spans]
        parts: list[tuple[slice, Attention]] = []
        for (how, count), tokens, spans in runs(batch, kinds):
            if how is None:
                parts.append((tokens, _Paged(self._cache, self.attend, spans, count)))
                continue
            parts += [
                (
                    slice(tokens.start + i * count, tokens.start + (i + 1) * count),
                    how(self._cache, self.attend, span),
                )
                for i, span in enumerate(spans)
            ]
        return Parts(parts)

    def _how(self, span: Span) -> "type[_Viewed] | type[_Gathered] | None":
        if span.count > FEW and len(self._cache.slots(span.blocks, 0, span.stop)) == 1:
            return _Viewed
        return _Gathered if span.count >= MANY else None


class _Viewed:
    """One span whose rows are one run of slots."""

    def __init__(self, cache: KVCache, attend: Kernel, span: Span) -> None:
        ((first, end),) = cache.slots(span.blocks, 0, span.stop)
        self._cache = cache
        self._attend = attend
        self._write = slice(first + span.start, end)
        self._read = slice(first, end)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.k[layer_index], self._cache.v[layer_index]
        keys[self._write] = k
        values[self._write] = v
        # Causal here means aligned at the right corner: the last query sees the last row.
        out = self._attend(
            q.unsqueeze(0), keys[self._read].unsqueeze(0), values[self._read].unsqueeze(0), causal=True
        )
        return out.squeeze(0)


class _Gathered:
    """One span whose rows lie here and there: they are copied side by side, layer by layer."""

    def __init__(self, cache: KVCache, attend: Kernel, span: Span) -> None:
        runs = cache.slots(span.blocks, 0, span.stop)
        slots = torch.cat([torch.arange(first, end) for first, end in runs])
        self._cache = cache
        self._attend = attend
        self._read = slots.to(cache.kv.device, non_blocking=True)
        self._write = self._read[span.start :]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.k[layer_index], self._cache.v[layer_index]
        keys[self._write] = k
        values[self._write] = v
        side_by_side = (x.index_select(0, self._read).unsqueeze(0) for x in (keys, values))
        return self._attend(q.unsqueeze(0), *side_by_side, causal=True).squeeze(0)


class _Paged:
    """Spans of the same number of tokens; the kernel writes their K and V too."""

    def __init__(self, cache: KVCache, attend: Kernel, spans: tuple[Span, ...], count: int) -> None:
        self._cache = cache
        self._attend = attend
        self._shape = (len(spans), count)
        tables = [span.blocks[: -(-span.stop // cache.block_size)] for span in spans]
        longest = max(map(len, tables))
        padded = [blocks + (0,) * (longest - len(blocks)) for blocks in tables]
        device = cache.kv.device
        self._tables = torch.tensor(padded, dtype=torch.int32).to(device, non_blocking=True)
        starts = [span.start for span in spans]
        self._starts = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)

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
