"""The records of sessions: plain data, independent of disk and screen."""

from dataclasses import dataclass, field
from typing import Any

from chatterm.backends.backend import Document, EngineError, ThinkCache, ThinkMode


class SessionError(EngineError):
    """A problem with sessions that the user can fix; one line."""


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
    """The user's messages on the selected branch: those shown when the session is opened."""
    branches: int = 0
    documents: tuple[Document, ...] = ()
    """The documents it began with; () in a list of sessions."""
