"""How many rows idle work computes at once, from what chunks took."""

from dataclasses import dataclass

IDLE_SECONDS = 0.02
"""An idle chunk takes at most about this long: so long a person may wait for idle work to give way, and half as long
they do wait."""
_FIRST = 8
"""Rows of the first chunk, when nothing has been measured yet."""
_SLOW_STEP = 1.5
"""Where even a single row takes nearly as long, a chunk takes at most so many times that: fewer rows would hardly be
quicker, since every step reads all weights."""


@dataclass(slots=True)
class IdlePace:
    """A step takes one amount of time for its first row and another for every further one; both are measured."""

    rows: int = _FIRST
    """Rows of the next idle chunk."""
    step_s: float = 0.0
    """What a step of one row took last, idle or not; 0.0 while none has been seen."""

    def saw(self, rows: int, seconds: float, most: int, idle: bool) -> None:
        """A step of `rows` took so long; a chunk has `most` at most. Only idle ones change the pace."""
        if rows == 1:
            self.step_s = seconds
        if not idle:
            return
        limit = max(IDLE_SECONDS, _SLOW_STEP * self.step_s)
        affordable = 2 * rows
        if rows > 1:
            each = max(seconds - self.step_s, 0.05 * seconds) / (rows - 1)
            affordable = 1 + int((limit - self.step_s) / max(each, 1e-9))
        # Grow slowly, shrink at once: a chunk must not overshoot because the one before was tiny.
        self.rows = max(1, min(affordable, 2 * rows, most))
