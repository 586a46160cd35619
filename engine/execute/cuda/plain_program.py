"""The decode step by the plain modules, with everything that changes between steps read from the device.

It is the reference of `engine/execute/cuda/fused_program.py`, and the program for models which that does not support,
if their attention is a plain softmax over all preceding rows.
"""

import torch
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.plain_modules import plain_modules
from engine.execute.cuda.slots import StepInput
from engine.kernels.flash import attend_pages
from models.network import Network


class PlainDecoder:
    """Runs one token of each sequence through the model, from a `StepInput` to logits on the device."""

    name = "plain modules"
    kv = None
    cuts = None

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        given: StepInput,
        attention: str,
        on_host: HostExperts | None = None,
    ) -> None:
        """`attention` names the backend whose kernel attends: "flash", or else Triton's. `on_host` computes the experts
        in host memory."""
        self._model = plain_modules(network, None if on_host is None else on_host.mix)
        self._cache = cache
        self._given = given
        self._flash = attention == "flash" and not cache.row.is_quantized

    def run(self, rows: int, limit: int, own: int = 0) -> Tensor:
        """Enqueue a step of the first `rows` rows; return logits [rows, vocab]. See `FusedDecoder.run`."""
        given = self._given
        slots = given.active[:rows].clamp(min=0)
        token = given.token.index_select(0, slots).clamp(min=0)
        positions = given.counters.index_select(0, slots)[:, 1].clamp(min=0)
        hidden = self._model.forward(token, positions, _Step(self._cache, given, rows, limit, self._flash))
        return self._model.logits(hidden)


class _Step:
    """The attention of one token of each sequence. Implements `models.reference.attention.Attention`."""

    def __init__(self, cache: KVCache, given: StepInput, rows: int, limit: int, flash: bool) -> None:
        self._cache = cache
        self._given = given
        self._flash = flash
        self._limit = limit
        real = (given.active[:rows] >= 0).int()
        slots = given.active[:rows].clamp(min=0)
        self._row = (given.counters.index_select(0, slots)[:, 0] * real).int()
        blocks = -(-limit // cache.block_size)
        self._tables = given.tables.index_select(0, slots)[:, :blocks].contiguous()
        self._real = real
        numbers = torch.arange(rows, dtype=torch.int32, device=real.device)
        self._spans = torch.stack((numbers, self._row, real), dim=-1)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from engine.kernels.triton.kv_rows import write_newest

        given, told, size = self._given, self._cache.told(layer_index), self._cache.block_size
        keys, values = self._cache.k[layer_index], self._cache.v[layer_index]
        write_newest((keys, values), told, given.active, given.counters, given.tables, size, k, v)
        if self._flash:
            pages = (-1, size, *k.shape[1:])
            seen, rows = (keys.view(pages), values.view(pages)), self._row + self._real
            return attend_pages(q.unsqueeze(1), seen, rows=rows, table=self._tables).squeeze(1)
        from engine.kernels.triton.paged_attention import paged_attention

        return paged_attention(
            q,
            keys,
            values,
            self._spans,
            self._tables,
            kv_heads=self._cache.row.heads,
            block_size=size,
            most_tokens=1,
            most_rows=self._limit,
            **told,
        )
