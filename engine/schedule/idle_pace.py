"""How many rows idle work computes at once, from what chunks took."""

from dataclasses import dataclass

IDLE_SECONDS = 0.01
"""An idle chunk takes about this long: half of it is what a person waits on average for idle work to give way."""
MOST_SECONDS = 0.05
"""So long a chunk may take where fewer rows would hardly be quicker."""
_FIRST = 8
"""Rows of the first chunk, when nothing has been measured yet."""
_FEW = 16
"""So many rows often take hardly longer than two: every step reads all weights, and the keys of all rows before."""
_SLOW_STEP = 1.5
"""Where a single row takes long, a chunk takes at most so many times that."""


@dataclass(slots=True)
class IdlePace:
    """Finds the rows that take IDLE_SECONDS. Steps grow in stairs, not in proportion: so it tries what is next."""

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
        fitting = int(rows * IDLE_SECONDS / max(seconds, 1e-9))
        if seconds <= IDLE_SECONDS:
            # By a quarter at least, or it would stay on a low stair; twice at most, or it would overshoot.
            fitting = min(max(fitting, rows + 1 + rows // 4), 2 * rows)
        else:
            limit = max(MOST_SECONDS, _SLOW_STEP * self.step_s)
            fitting = min(max(fitting, _FEW), int(rows * limit / seconds))
        self.rows = max(1, min(fitting, most))
