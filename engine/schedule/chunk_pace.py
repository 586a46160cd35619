"""How many rows of prompts run beside decoding, from what chunks took."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, TypeVar

import torch

from models.spec import ModelSpec
from models.weights.slots import layer_parameters

T = TypeVar("T")

DELAY_S = 0.02
"""So much later at most comes a token of those who decode."""
AIM = 0.8
"""Of that; the next chunk has more rows before it than the last one, and takes a little longer."""
FEWEST = 16
"""Every chunk reads all weights: fewer rows are hardly quicker."""
FIRST = 64
"""Rows of the first chunk, when nothing has been measured yet."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a row of a prompt costs, in rows with nothing before them: the later it comes, the more it attends to."""

    even: float = inf
    """Rows of context whose attention takes as many FLOPs as a row's products."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "RowCost":
        """2 FLOPs a weight of the layers, and 4 a number of the query heads for each row of context."""
        numbers = sum(layer.attention.heads * layer.attention.head_dim for layer in spec.layers)
        return cls(layer_parameters(spec) / (2.0 * numbers))

    def cost(self, start: int, rows: int) -> float:
        """Of rows `start` to `start + rows` of a sequence."""
        return rows * (1 + (start + rows / 2) / self.even)

    def rows(self, start: int, cost: float) -> int:
        """How many rows from `start` on cost no more than that: the root of `cost`."""
        if self.even == inf:
            return int(cost)
        before = self.even + start
        return int(sqrt(before * before + 2 * self.even * cost) - before)


@dataclass(slots=True)
class ChunkPace:
    """Finds the cost of a chunk (see `RowCost`) that takes DELAY_S."""

    rows: int = FIRST
    """Most that the next chunk beside decoding may cost."""

    def saw(self, rows: float, seconds: float) -> None:
        """A chunk that costs `rows` took so long. A small one that was quick says nothing of a larger one."""
        aim = AIM * DELAY_S
        if rows < self.rows and seconds <= aim:
            return
        fitting = rows * aim / max(seconds, 1e-9)
        self.rows = max(FEWEST, int(min(fitting, 2 * max(rows, self.rows))))


class ChunkTimer:
    """How long chunks take on a GPU. Nobody waits for it: one that runs is told of when the next one comes."""

    def __init__(self, saw: Callable[[int, float, float], None]) -> None:
        """`saw` is told the rows of a chunk, its cost and the seconds it took."""
        self._saw = saw
        self._running: tuple[Any, Any, int, float] | None = None

    def of(self, rows: int, cost: float, compute: Callable[[], T]) -> T:
        """Do `compute`, which enqueues the work of a chunk of `rows` rows, and have it timed there."""
        self._read()
        if self._running is not None:
            return compute()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = compute()
        end.record()
        self._running = start, end, rows, cost
        return result

    def forget(self) -> None:
        """Do not tell of the last chunk: it took longer than such chunks do."""
        self._running = None

    def _read(self) -> None:
        if self._running is not None and self._running[1].query():
            start, end, rows, cost = self._running
            self._running = None
            self._saw(rows, cost, start.elapsed_time(end) / 1e3)
