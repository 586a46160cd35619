"""The decode step by the plain modules, with everything that changes from step to step read from the device.

The reference of `engine/fused.py`, and the program of the models that it does not know.
"""

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from models.decoder import DecoderModel


class PlainDecoder:
    """One token through the model, from `token` and `counters` on the device to logits on the device."""

    name = "plain modules"

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        token: Tensor,
        counters: Tensor,
        table: Tensor,
        attention: str,
    ) -> None:
        """As FusedDecoder; `attention` is the name of the backend whose kernel attends: flash, or else triton's."""
        self._model = model
        self._cache = cache
        self._token = token
        self._counters = counters
        self._table = table
        self._flash = attention == "flash"

    def run(self, limit: int) -> Tensor:
        """Enqueue a step; logits [vocab_size] in the model's dtype. The row of the token must be below `limit`."""
        attend = _FlashStep if self._flash else _TritonStep
        step = attend(self._cache, self._counters, self._table, limit)
        hidden = self._model.forward(self._token.clamp(min=0), self._counters[1:], step)
        return self._model.logits(hidden)[0]


class _TritonStep:
    def __init__(self, cache: KVCache, counters: Tensor, table: Tensor, limit: int) -> None:
        self._cache = cache
        self._limit = limit
        row, size = counters[:1], cache.block_size
        self._slot = table.index_select(0, row // size).long() * size + row % size
        ends = torch.zeros_like(row)
        self._spans = torch.stack((ends, row, ends + 1), dim=-1).int()
        self._tables = table.unsqueeze(0)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from engine.kernels.paged_attention import paged_attention

        keys, values = self._cache.k[layer_index], self._cache.v[layer_index]
        keys.index_copy_(0, self._slot, k)
        values.index_copy_(0, self._slot, v)
        return paged_attention(
            q,
            keys,
            values,
            self._spans,
            self._tables,
            block_size=self._cache.block_size,
            most_tokens=1,
            most_rows=self._limit,
        )


class _FlashStep:
    def __init__(self, cache: KVCache, counters: Tensor, table: Tensor, limit: int) -> None:
        self._cache = cache
        self._row = counters[:1].int()
        self._tables = table[: -(-limit // cache.block_size)].unsqueeze(0)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        pages = (-1, self._cache.block_size, *k.shape[1:])
        out: Tensor = flash_attn_with_kvcache(
            q.unsqueeze(0),
            self._cache.k[layer_index].view(pages),
            self._cache.v[layer_index].view(pages),
            k=k.unsqueeze(0),
            v=v.unsqueeze(0),
            cache_seqlens=self._row,
            block_table=self._tables,
            causal=True,
        )
        return out.squeeze(0)
