"""What a session is made of: plain records that know neither the disk nor the screen."""

from dataclasses import dataclass, field
from typing import Any

from chatterm.backend import EngineError, ThinkCache, ThinkMode


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
