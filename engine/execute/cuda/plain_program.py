"""The decode step by the plain modules, with everything that changes between steps read from the device.

It is the reference of `engine/execute/cuda/fused_program.py`, and the program for models which that does not support,
if their attention is a plain softmax over all preceding rows.
"""

import torch
from torch import Tensor

from engine.attention.flash import LastTokens
from engine.attention.triton import PagedStep, WriteTokens
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.plain_modules import plain_modules
from engine.execute.cuda.slots import StepInput
from models.network import Network
from models.reference.attention import Attention


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
        hidden = self._model.forward(token, positions, self._attention(slots, rows, limit))
        return self._model.logits(hidden)

    def _attention(self, slots: Tensor, rows: int, limit: int) -> Attention:
        """Return the attention of the newest token in each of `slots` int32 [rows], which lies in a row below `limit`.

        Rows of the step without a slot write nothing and see nothing.
        """
        given, cache, size = self._given, self._cache, self._cache.block_size
        real = (given.active[:rows] >= 0).int()
        row = (given.counters.index_select(0, slots)[:, 0] * real).int()
        tables = given.tables[0].index_select(0, slots)[:, : -(-limit // size)].contiguous()
        block = tables.gather(1, (row // size).long()[:, None])[:, 0]
        write = WriteTokens(cache, [torch.where(real > 0, block * size + row % size, -1)])
        if self._flash:
            return LastTokens(cache, {}, write, row + real, [tables])
        numbers = torch.arange(rows, dtype=torch.int32, device=real.device)
        spans = torch.stack((numbers, row, real), dim=-1)
        return PagedStep(cache, write, spans, tables, most_tokens=1, most_rows=limit)
