"""Arrival times of the tokens of an answer, and the token rate that they allow to be measured."""

from collections import deque
from dataclasses import dataclass

_TOGETHER = 0.05
"""Tokens that arrive within this many seconds form one burst: they were not generated at the moment they arrived."""
_SHORTEST = 0.1
"""The shortest time, in seconds, over which a rate is measured. Below it, delays of the network or of this program
would dominate."""


@dataclass(slots=True)
class Burst:
    """Tokens that arrived together: when the first and the last of them did, and how many there are."""

    begun: float
    latest: float
    count: int


class Arrivals:
    """Arrival times of the tokens of one answer, by `time.monotonic()`. They must be added in order."""

    def __init__(self) -> None:
        self.count = 0
        self.first: float | None = None
        """When the first token arrived; None before that."""
        self.opening: Burst | None = None
        """The first burst. Rates leave it out, because nothing shows when its generation began."""
        self.bursts: deque[Burst] = deque(maxlen=64)
        """The latest bursts, which cover at least three seconds once there are 64."""

    def add(self, time: float, count: int = 1) -> None:
        """Note that `count` tokens arrived at `time`."""
        self.count += count
        if self.bursts and time - self.bursts[-1].begun <= _TOGETHER:
            self.bursts[-1].latest = time
            self.bursts[-1].count += count
        else:
            self.bursts.append(Burst(time, time, count))
        if self.opening is None:
            self.first, self.opening = time, self.bursts[-1]

    def measured(self) -> tuple[int, float]:
        """Return the number of tokens after the first burst and the seconds in which they arrived.

        Return (0, 0.0) if these do not allow a rate to be measured.
        """
        if self.opening is None:
            return 0, 0.0
        return measured(self.count - self.opening.count, self.bursts[-1].latest - self.opening.latest)


def measured(tokens: int, seconds: float) -> tuple[int, float]:
    """Return `tokens` and the `seconds` in which they arrived; (0, 0.0) if that is too little to measure a rate."""
    return (tokens, seconds) if tokens > 0 and seconds >= _SHORTEST else (0, 0.0)


def rate(tokens: int, seconds: float) -> float:
    """Return the tokens per second; 0.0 if they cannot be measured."""
    tokens, seconds = measured(tokens, seconds)
    return tokens / seconds if tokens else 0.0
