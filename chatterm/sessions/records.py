"""What a session is made of: plain records that know neither the disk nor the screen."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chatterm.backends.backend import EngineError, Outcome, ThinkCache, ThinkMode, TokenEvent


class SessionError(EngineError):
    """Something about sessions that a person can mend; one line."""


@dataclass(slots=True)
class Exchange:
    """A message of the person and the answer to it: one node of a session's tree."""

    id: int
    """Numbers of the session's own, from 1."""
    parent: int | None
    """The exchange it follows; None at the start of the conversation."""
    user: str
    text: str = ""
    """The answer, without its thinking."""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every token sampled, markers and end of turn included; ids of `model`."""
    shown: tuple[int, int] = (0, 0)
    """Which of `token_ids` the history shows."""
    opening: list[int] = field(default_factory=list)
    """What the generation prompt put before the answer and the history leaves out."""
    finish_reason: str | None = None
    """None while it runs; read back from the disk: it was cut off by a crash."""
    stats: dict[str, float] = field(default_factory=dict)
    """Fields of TurnStats."""
    model: str = ""
    created: float = 0.0
    """Seconds since the epoch."""
    thinking_s: float = 0.0
    seed: int | None = None
    """Of the random numbers: with the number of tokens it is the state of sampling."""
    ends_at: int | None = None
    """While it runs: the number of tokens at which `max_tokens` ends it, if anything does."""

    def take(self, answer: Outcome) -> None:
        """The answer is this one, whole or as far as it has come."""
        self.text, self.reasoning = answer.text, answer.reasoning
        self.token_ids = list(answer.token_ids)
        self.shown, self.opening = answer.shown, list(answer.opening)
        self.stats = dict(answer.stats.to_dict())
        self.finish_reason = str(answer.finish_reason) if answer.finish_reason is not None else None
        self.seed, self.ends_at = answer.seed, answer.ends_at

    def add(self, events: Iterable[TokenEvent]) -> None:
        """The next tokens of the answer."""
        text, reasoning = [self.text], [self.reasoning]
        for event in events:
            self.token_ids.append(event.token_id)
            (reasoning if event.kind == "reasoning" else text).append(event.text)
        self.text, self.reasoning = "".join(text), "".join(reasoning)


@dataclass(slots=True)
class SessionInfo:
    """A session without its exchanges."""

    id: str = ""
    title: str = ""
    """One line, safe for a terminal; "" until there is a first message."""
    model: str = ""
    system: str | None = None
    think: ThinkMode = "auto"
    think_cache: ThinkCache = "exact"
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that were chosen for it."""
    created: float = 0.0
    """Seconds since the epoch; so is `updated`."""
    updated: float = 0.0
    exchanges: int = 0
    """Exchanges on all branches."""
    tokens: int = 0
    """Tokens generated on all branches."""
    messages: int = 0
    """Messages of the person on the branch that is selected: those that opening it shows."""
    branches: int = 0
