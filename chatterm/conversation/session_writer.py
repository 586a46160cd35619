"""Save one conversation as it happens. Without a store, every call does nothing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chatterm.backends.backend import Backend, Document, Exchange, TokenEvent
from chatterm.sessions.records import SessionInfo

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore


def session_info(
    backend: Backend, sampling: Mapping[str, Any], documents: tuple[Document, ...] | None = None
) -> SessionInfo:
    """Return the settings that a session is saved with. `documents` are those at its start (None: the backend's)."""
    return SessionInfo(
        model=backend.model,
        system=backend.options.system,
        think=backend.options.think,
        think_cache=backend.options.think_cache,
        sampling=dict(sampling),
        documents=backend.options.documents if documents is None else documents,
    )


class Keeper:
    """Saves one conversation. Every method returns at once."""

    def __init__(self, store: "SessionStore | None", session: str | None = None) -> None:
        self.store = store
        self.session = session
        """The session that is written; None before the first message."""

    @property
    def problem(self) -> str:
        """A line while data stays in memory only; otherwise ""."""
        return self.store.problem if self.store is not None else ""

    @property
    def was_deleted(self) -> str:
        """A line, once, if another program deleted the session; otherwise ""."""
        return (
            self.store.was_deleted(self.session)
            if self.store is not None and self.session is not None
            else ""
        )

    def begin(self, info: SessionInfo) -> None:
        """Begin a session, unless one has begun already."""
        if self.store is not None and self.session is None:
            self.session = self.store.new(info)
            self.store.draft(None, "")

    def leave(self) -> None:
        """Leave the session: the next `begin` makes another one."""
        self.session = None

    def save(self, session: str | None, exchange: Exchange) -> None:
        if self.store is not None and session is not None:
            self.store.save(session, exchange)

    def say(self, session: str | None, exchange: Exchange, events: Sequence[TokenEvent]) -> None:
        """Save the next tokens of an answer that was saved when it began."""
        if self.store is not None and session is not None:
            self.store.say(session, exchange, events)

    def drop(self, session: str | None, exchange: int) -> None:
        if self.store is not None and session is not None:
            self.store.drop(session, exchange)

    def head(self, exchange: int | None) -> None:
        if self.store is not None and self.session is not None:
            self.store.head(self.session, exchange)

    def update(self, **fields: Any) -> None:
        if self.store is not None and self.session is not None:
            self.store.update(self.session, **fields)

    def draft(self, text: str) -> None:
        if self.store is not None:
            self.store.draft(self.session, text)

    def add_prompt(self, text: str) -> None:
        if self.store is not None:
            self.store.add_prompt(text)
