"""Sum the products of a prompt over all ranks: each rank reads the others' rows in their memory."""

import torch
from torch import Tensor

from engine.execute.cuda.add_norm import AddNorm, add_norm
from engine.execute.cuda.all_reduce import AllReduce
from engine.execute.cuda.peer_memory import tensor_at
from models.reference.collective import Collective


class PromptSums:
    """Implements `engine.execute.cuda.prefill.Sums`. Only for the engine loop's thread.

    Two places alternate. A rank writes to a place only after it has summed what is in the other one. By then every rank
    has written there, and so has read what was in this one. Sums are counted by the host: they are never recorded.
    """

    def __init__(
        self, exchange: AllReduce, peers: Collective, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`peers` sum products of more rows than the memory of `exchange` has room for."""
        plan, own = exchange.plan, exchange.memory.addresses[exchange.rank]
        self._exchange = exchange
        self._peers = peers
        self._sums = 0
        self._no_epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = [
            tensor_at(own + 4 * (plan.prompts + place * plan.place), (plan.prompt, plan.size), dtype, device)
            for place in range(2)
        ]

    def place(self, rows: int) -> Tensor | None:
        """See `Sums`."""
        place = self._places[(self._sums + 1) % 2]
        return place[:rows] if rows <= len(place) else None

    def add_norm(self, x: Tensor, residual: Tensor, between: AddNorm, out: Tensor, total: Tensor) -> None:
        """See `Sums`."""
        place = self.place(len(residual))
        if place is None:
            add_norm(self._peers.sum(x), residual, between, out, total)
            return
        if x.data_ptr() != place.data_ptr():
            place.copy_(x)
        self._sums += 1
        plan, counted = self._exchange.plan, (self._no_epoch, self._sums)
        self._exchange.sum_norm(x, residual, between, out, total, *counted, plan.place, plan.prompts)
