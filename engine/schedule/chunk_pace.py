"""How many rows of prompts run beside decoding, learned from the times of chunks."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from sys import maxsize
from typing import Any, TypeVar

import torch

from models.spec import LatentAttention, ModelSpec
from models.weights.slots import layer_parameters

T = TypeVar("T")

DELAY_S = 0.02
"""The most that a chunk may delay the next token of sequences that decode, in seconds."""
AIM = 0.8
"""The share of DELAY_S to aim at: the next chunk has more rows before it, and takes a little longer."""
FIXED_S = 0.3 * DELAY_S
"""The assumed duration of a chunk of any size, for estimating how much faster a smaller chunk is."""
ALL = 0.9
"""A chunk counts as full from this share of its limits on."""
GROWTH = 4.0
"""The next chunk is at most this many times as large."""
ATTENTION = 0.75
"""Attention's assumed FLOP/s, as a share of those of matrix products."""
PADDING = 1.1
"""The most that padding to a recorded size may multiply the rows of a chunk by."""
FEWEST = 16
"""The fewest rows of a chunk: every chunk reads all weights, so fewer rows are hardly faster."""
FIRST = 64
"""Rows of the first chunk, before anything has been measured."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """The cost of a prompt's row, in rows with nothing before them: the later a row, the more it attends to."""

    even: float = inf
    """The rows of context whose attention takes as long as a row's products."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "RowCost":
        """Count 2 FLOPs per weight of the layers, and for a row of context 2 per number of every key and value."""
        numbers = sum(2 * attention.heads * attention.head_dim for attention in spec.attentions.values())
        latents = (layer.mixer for layer in spec.layers if isinstance(layer.mixer, LatentAttention))
        numbers += sum(latent.heads * (latent.head_dim + latent.v_dim) for latent in latents)
        return cls(ATTENTION * layer_parameters(spec) / numbers)

    def cost(self, start: int, rows: int) -> float:
        """Return the cost of rows `start` to `start + rows` of a sequence."""
        return rows * (1 + (start + rows / 2) / self.even)

    def rows(self, start: int, cost: float) -> int:
        """Return how many rows from `start` on cost at most `cost`, by solving `cost` for the rows."""
        if inf in (self.even, cost):
            return int(min(cost, maxsize))
        before = self.even + start
        return int(sqrt(before * before + 2 * self.even * cost) - before)


@dataclass(slots=True)
class ChunkPace:
    """Limits a chunk beside decoding so that it takes DELAY_S at most.

    The limits are learned from the times of chunks. Each chunk is a bound for later ones: fewer rows, or as many with
    fewer before them, take no longer. More rows take longer by no more than they cost more (see `RowCost`), because
    more of them share the time that does not depend on the rows.
    """

    rows: int = FIRST
    """The most rows of the next chunk."""
    cost: float = FIRST
    """The most that they may cost."""

    def saw(self, rows: int, cost: float, seconds: float) -> None:
        """Note that a chunk of `rows` rows with this cost took `seconds`. A small, fast chunk says nothing."""
        aim = AIM * DELAY_S
        if seconds > aim:
            share = (aim - FIXED_S) / (seconds - FIXED_S)
        elif rows < ALL * self.rows and cost < ALL * self.cost:
            return
        else:
            share = min(aim / max(seconds, 1e-9), GROWTH)
        self.rows, self.cost = max(FEWEST, int(rows * share)), max(float(FEWEST), cost * share)


class ChunkTimer:
    """Measures how long chunks take on a GPU. It never waits, but reports chunks once they are done."""

    def __init__(self) -> None:
        self._running: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def of(self, saw: Callable[[float], None], compute: Callable[[], T]) -> T:
        """Run `compute`, which enqueues the work of a chunk; `saw` later gets the seconds that it took on the GPU."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = compute()
        end.record()
        self._running.append((start, end, saw))
        return result

    def forget(self) -> None:
        """Do not report the last chunk, because it took longer than such chunks normally do."""
        self._running.pop()

    def read(self) -> None:
        """Report the chunks that are done."""
        while self._running and self._running[0][1].query():
            start, end, saw = self._running.popleft()
            saw(start.elapsed_time(end) / 1e3)
