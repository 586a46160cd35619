"""How many rows idle work computes at once, learned from the times of chunks."""

from dataclasses import dataclass

IDLE_SECONDS = 0.01
"""About the seconds of an idle chunk; a person waits half of it on average until idle work gives way."""
MOST_SECONDS = 0.05
"""The most seconds of a chunk when fewer rows would hardly be faster."""
_FIRST = 8
"""Rows of the first chunk, before anything has been measured."""
_FEW = 16
"""This many rows often take hardly longer than two: every step reads all weights, and the keys of all rows before."""
_SLOW_STEP = 1.5
"""If a single row takes long, a chunk takes at most this many times as long."""
_DOUBT = 0.97
"""What remains, with each step of one row, of what further rows are believed to cost: in time two are tried again."""


@dataclass(slots=True)
class IdlePace:
    """Finds the rows that take IDLE_SECONDS. Step times grow in stairs, not in proportion, so it probes upwards."""

    rows: int = _FIRST
    """Rows of the next idle chunk."""
    step_s: float = 0.0
    """The seconds of the latest step of one row, idle or not; 0.0 before the first."""
    further_s: float = 0.0
    """The seconds that each row after the first added to the latest idle step; 0.0: unknown."""

    def saw(self, rows: int, seconds: float, most: int, idle: bool) -> None:
        """Note that a step of `rows` rows took `seconds`; a chunk has at most `most`. Only idle steps set the pace."""
        if rows == 1:
            self.step_s = seconds
        if not idle:
            return
        if rows == 1:
            self.further_s *= _DOUBT
        elif self.step_s:
            self.step_s = min(self.step_s, seconds)  # a row alone takes no longer than several
            self.further_s = (seconds - self.step_s) / (rows - 1)
        fitting = int(rows * IDLE_SECONDS / max(seconds, 1e-9))
        if seconds <= IDLE_SECONDS:
            # At least a quarter more, or it would stay on a low stair; at most twice as many, or it would overshoot.
            fitting = min(max(fitting, rows + 1 + rows // 4), 2 * rows)
        else:
            fitting = min(max(fitting, _FEW), self._bearable(rows, seconds))
        self.rows = max(1, min(fitting, most))

    def _bearable(self, rows: int, seconds: float) -> int:
        """Return the most rows for which a person may wait, after a step of `rows` rows that took `seconds`."""
        limit = max(MOST_SECONDS, _SLOW_STEP * self.step_s)
        if not self.step_s:
            return int(rows * limit / seconds)
        if not self.further_s:
            return 2 * rows
        return 1 + int((limit - self.step_s) / self.further_s)
