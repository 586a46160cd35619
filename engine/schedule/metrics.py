"""The metrics of an engine's service: counters that only grow, and the latest waiting times."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.schedule.sequence import Sequence


@dataclass(slots=True)
class Tally:
    """Counters that the loop thread updates whenever it draws a token for a person; other threads only read."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The tokens of prompts that were cached."""
    generated_tokens: int = 0
    guessed_tokens: int = 0
    """Guesses that were checked."""
    accepted_tokens: int = 0
    """Guesses that were right."""
    preemptions: int = 0
    first_waits: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    """Seconds until the first token, for the latest answers."""
    token_waits: deque[float] = field(default_factory=lambda: deque(maxlen=2000))
    """Seconds between two tokens of an answer, for the latest tokens."""

    def drew(self, sequence: "Sequence", now: float) -> None:
        """Count a token for `sequence`, whose own times are not updated yet."""
        self.generated_tokens += 1
        if sequence.first_token:
            self.token_waits.append(now - sequence.last_token)
            return
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += sequence.cached_tokens
        self.first_waits.append(now - sequence.created)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The number of people's requests in each state, and the tally."""

    running: int
    waiting: int
    preempted: int
    tally: Tally


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that `share` (0 to 1) of all values do not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)) - 1, 0)] if ordered else None
