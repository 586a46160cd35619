"""How many rows of prompts run beside decoding, from what chunks took."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from sys import maxsize
from typing import Any, TypeVar

import torch

from models.spec import ModelSpec
from models.weights.slots import layer_parameters

T = TypeVar("T")

DELAY_S = 0.02
"""So much later at most comes a token of those who decode."""
AIM = 0.8
"""Of that; the next chunk has more rows before it than the last one, and takes a little longer."""
FIXED_S = 0.3 * DELAY_S
"""What a chunk is believed to take however small it is, where one of fewer rows than the last one is sought."""
ALL = 0.9
"""So much of what it may have or cost has a chunk that was as large as could be."""
GROWTH = 4.0
"""So many times as large is the next chunk at most."""
ATTENTION = 0.75
"""What attention is believed to get of the FLOPs that products get."""
PADDING = 1.1
"""So much more than that is computed at most where a chunk is padded to a size that is recorded."""
FEWEST = 16
"""Every chunk reads all weights: fewer rows are hardly quicker."""
FIRST = 64
"""Rows of the first chunk, when nothing has been measured yet."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a row of a prompt costs, in rows with nothing before them: the later it comes, the more it attends to."""

    even: float = inf
    """Rows of context whose attention takes as long as a row's products."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "RowCost":
        """2 FLOPs a weight of the layers, and 4 a number of the query heads for each row of context."""
        numbers = sum(layer.attention.heads * layer.attention.head_dim for layer in spec.layers)
        return cls(ATTENTION * layer_parameters(spec) / (2.0 * numbers))

    def cost(self, start: int, rows: int) -> float:
        """Of rows `start` to `start + rows` of a sequence."""
        return rows * (1 + (start + rows / 2) / self.even)

    def rows(self, start: int, cost: float) -> int:
        """How many rows from `start` on cost no more than that: the root of `cost`."""
        if inf in (self.even, cost):
            return int(min(cost, maxsize))
        before = self.even + start
        return int(sqrt(before * before + 2 * self.even * cost) - before)


@dataclass(slots=True)
class ChunkPace:
    """How large a chunk beside decoding may be, to take DELAY_S at most.

    It is found from what other chunks took, each of which is a bound for those to come: fewer rows take no longer, nor
    do as many with less before them; more rows take longer by no more than they cost more (see `RowCost`), since what
    does not depend on the rows is shared by more of them.
    """

    rows: int = FIRST
    """Most that the next chunk may have."""
    cost: float = FIRST
    """And what they may cost."""

    def saw(self, rows: int, cost: float, seconds: float) -> None:
        """A chunk of `rows` rows, which cost so much, took so long. A small one that was quick says nothing."""
        aim = AIM * DELAY_S
        if seconds > aim:
            share = (aim - FIXED_S) / (seconds - FIXED_S)
        elif rows < ALL * self.rows and cost < ALL * self.cost:
            return
        else:
            share = min(aim / max(seconds, 1e-9), GROWTH)
        self.rows, self.cost = max(FEWEST, int(rows * share)), max(float(FEWEST), cost * share)


class ChunkTimer:
    """How long chunks take on a GPU. Nobody waits for it: it tells of those that are done."""

    def __init__(self) -> None:
        self._running: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def of(self, saw: Callable[[float], None], compute: Callable[[], T]) -> T:
        """Do `compute`, which enqueues the work of a chunk; `saw` is told later how many seconds it took there."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = compute()
        end.record()
        self._running.append((start, end, saw))
        return result

    def forget(self) -> None:
        """Do not tell of the last chunk: it took longer than such chunks do."""
        self._running.pop()

    def read(self) -> None:
        """Tell of the chunks that are done."""
        while self._running and self._running[0][1].query():
            start, end, saw = self._running.popleft()
            saw(start.elapsed_time(end) / 1e3)
