"""The decode step by the plain modules, with everything that changes from step to step read from the device.

The reference of `engine/execute/cuda/fused_program.py`, and the program of the models that it does not know.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.triton import PagedStep
from engine.cache.kv_cache import KVCache
from models.network import Network
from models.reference.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a decode step reads, all on the device, so that the next step needs nothing from the host."""

    token: Tensor
    """int64 [1]"""
    counters: Tensor
    """int64 [2]: the token's row, its position."""
    table: Tensor
    """int32 [blocks]"""


class PlainDecoder:
    """One token through the model, from its `StepInput` to logits on the device."""

    name = "plain modules"

    def __init__(self, network: Network, cache: KVCache, given: StepInput, attention: str) -> None:
        """`attention` is the name of the backend whose kernel attends: flash, or else triton's."""
        self._model = Decoder(network)
        self._cache = cache
        self._given = given
        self._flash = attention == "flash"

    def run(self, limit: int) -> Tensor:
        """Enqueue a step; logits [vocab_size] in the model's dtype. The row of the token must be below `limit`."""
        given = self._given
        attend = _FlashStep if self._flash else _triton_step
        step = attend(self._cache, given.counters, given.table, limit)
        hidden = self._model.forward(given.token.clamp(min=0), given.counters[1:], step)
        return self._model.logits(hidden)[0]


def _triton_step(cache: KVCache, counters: Tensor, table: Tensor, limit: int) -> PagedStep:
    row, size = counters[:1], cache.block_size
    slot = table.index_select(0, row // size).long() * size + row % size
    none = torch.zeros_like(row)
    spans = torch.stack((none, row, none + 1), dim=-1).int()
    return PagedStep(cache, slot, spans, table.unsqueeze(0), most_tokens=1, most_rows=limit)


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
