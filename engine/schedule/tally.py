"""What people got of an engine, and how soon: counters that only grow, and the latest waits."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.schedule.sequence import Sequence


@dataclass(slots=True)
class Tally:
    """The loop thread writes it, whenever it draws a token for a person; others read."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts' tokens those that were in the cache."""
    generated_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    """Guesses that were checked, and those that were right."""
    preemptions: int = 0
    first_waits: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    """Seconds until the first token, of the latest answers."""
    token_waits: deque[float] = field(default_factory=lambda: deque(maxlen=2000))
    """Seconds between two tokens of an answer, of the latest tokens."""

    def drew(self, sequence: "Sequence", now: float) -> None:
        """A token for `sequence`; its own times are still those before."""
        self.generated_tokens += 1
        if sequence.first_token:
            self.token_waits.append(now - sequence.last_token)
            return
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += sequence.cached_tokens
        self.first_waits.append(now - sequence.created)


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many answers for people are where, and the tally of all."""

    running: int
    waiting: int
    preempted: int
    tally: Tally


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that so large a share of all (0 to 1) does not exceed; None where there are none."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)) - 1, 0)] if ordered else None
