"""How many rows of prompts run beside decoding, from what chunks took."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

DELAY_S = 0.02
"""So much later at most comes a token of those who decode."""
AIM = 0.8
"""Of that; the next chunk has more rows before it than the last one, and takes a little longer."""
FEWEST = 16
"""Every chunk reads all weights: fewer rows are hardly quicker."""
FIRST = 64
"""Rows of the first chunk, when nothing has been measured yet."""


@dataclass(slots=True)
class ChunkPace:
    """Finds the rows that take DELAY_S."""

    rows: int = FIRST
    """Most rows of the next chunk beside decoding."""

    def saw(self, rows: int, seconds: float) -> None:
        """A chunk of `rows` took so long. A small one that was quick says nothing of a larger one."""
        aim = AIM * DELAY_S
        if rows < self.rows and seconds <= aim:
            return
        fitting = int(rows * aim / max(seconds, 1e-9))
        self.rows = max(FEWEST, min(fitting, 2 * max(rows, self.rows)))


class ChunkTimer:
    """How long chunks take on a GPU. Nobody waits for it: one that runs is told of when the next one comes."""

    def __init__(self, *saw: Callable[[int, float], None]) -> None:
        """`saw` are told the rows of a chunk and the seconds it took."""
        self._saw = saw
        self._running: tuple[Any, Any, int] | None = None

    def of(self, rows: int, compute: Callable[[], T]) -> T:
        """Do `compute`, which enqueues the work of a chunk of `rows` rows, and have it timed there."""
        self._read()
        if self._running is not None:
            return compute()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = compute()
        end.record()
        self._running = start, end, rows
        return result

    def forget(self) -> None:
        """Do not tell of the last chunk: it took longer than such chunks do."""
        self._running = None

    def _read(self) -> None:
        if self._running is not None and self._running[1].query():
            start, end, rows = self._running
            self._running = None
            for saw in self._saw:
                saw(rows, start.elapsed_time(end) / 1e3)
