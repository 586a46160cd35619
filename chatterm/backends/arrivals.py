"""When the tokens of an answer came, and how much of that tells how fast they were made."""

from collections import deque
from dataclasses import dataclass

_TOGETHER = 0.05
"""Seconds within which tokens came together: what arrives at once was not made at once."""
_SHORTEST = 0.1
"""Seconds from which a rate can be told: over less of them it would be that of the network, or of this program."""


@dataclass(slots=True)
class Burst:
    """Tokens that came together."""

    begun: float
    latest: float
    count: int


class Arrivals:
    """Times are those of `time.monotonic()`, each not before the last."""

    def __init__(self) -> None:
        self.count = 0
        self.first: float | None = None
        """When the first token came."""
        self.opening: Burst | None = None
        """The first burst. How long it took to make is not known: its beginning was not seen."""
        self.bursts: deque[Burst] = deque(maxlen=64)
        """The latest, which are at least three seconds."""

    def add(self, time: float, count: int = 1) -> None:
        """`count` tokens came at `time`."""
        self.count += count
        if self.bursts and time - self.bursts[-1].begun <= _TOGETHER:
            self.bursts[-1].latest = time
            self.bursts[-1].count += count
        else:
            self.bursts.append(Burst(time, time, count))
        if self.opening is None:
            self.first, self.opening = time, self.bursts[-1]

    def measured(self) -> tuple[int, float]:
        """Tokens after the first burst, and the seconds in which they came; (0, 0.0) where no rate can be told."""
        if self.opening is None:
            return 0, 0.0
        return measured(self.count - self.opening.count, self.bursts[-1].latest - self.opening.latest)


def measured(tokens: int, seconds: float) -> tuple[int, float]:
    """`tokens` and the `seconds` in which they came; (0, 0.0) where that tells no rate."""
    return (tokens, seconds) if tokens > 0 and seconds >= _SHORTEST else (0, 0.0)


def rate(tokens: int, seconds: float) -> float:
    """Tokens/s; 0.0 where none can be told."""
    tokens, seconds = measured(tokens, seconds)
    return tokens / seconds if tokens else 0.0
