"""A conversation as a tree of exchanges, saved as it changes. Without a store, nothing is saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chatterm.backends.backend import Backend, Document, Exchange, TokenEvent, ToolResult
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.tree import Tree

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


@dataclass(eq=False)
class SessionTree:
    """The tree of a conversation and the session that it is saved in. Every method returns at once."""

    store: "SessionStore | None"
    session: str | None = None
    """The session that is written; None before the first message."""
    tree: Tree = field(default_factory=Tree)
    info: SessionInfo = field(default_factory=SessionInfo)
    """The settings that the session was saved with, and the title given to it; "" if it has none."""

    @property
    def path(self) -> list[Exchange]:
        """The selected branch."""
        return self.tree.path(self.tree.head)

    @property
    def problem(self) -> str:
        """A line while data stays in memory only; otherwise ""."""
        return self.store.problem if self.store is not None else ""

    @property
    def was_deleted(self) -> str:
        """A line, once, if another program deleted the session; otherwise ""."""
        return self.store.was_deleted(self.session) if self.store is not None and self.session else ""

    # --- exchanges ---

    def add(self, parent: int | None, text: str, model: str, results: Sequence[ToolResult] = ()) -> Exchange:
        """Add and select an exchange without an answer. It tells the `results` of the calls of `parent`, if any."""
        exchange = self.tree.add(parent, text, model)
        exchange.results = list(results)
        return exchange

    def save(self, exchange: Exchange) -> None:
        if self.store is not None and self.session is not None:
            self.store.save(self.session, exchange)

    def say(self, exchange: Exchange, events: Sequence[TokenEvent]) -> None:
        """Save the next tokens of an answer that was saved when it began."""
        if self.store is not None and self.session is not None:
            self.store.say(self.session, exchange, events)

    def drop(self, exchange: Exchange) -> None:
        """Remove an exchange that nothing follows."""
        self.tree.drop(exchange.id)
        if self.store is not None and self.session is not None:
            self.store.drop(self.session, exchange.id)

    def select(self, head: int | None) -> None:
        """Select the branch that ends with `head`."""
        self.tree.select(head)
        if self.store is not None and self.session is not None:
            self.store.head(self.session, head)

    # --- the session ---

    def begin_session(self, info: SessionInfo) -> None:
        """Begin a session like `info`, unless one has begun already."""
        if self.store is not None and self.session is None:
            self.info = replace(info, title=self.info.title)
            self.session = self.store.new(self.info)

    def update(self, **fields: Any) -> None:
        """Change the title, the system prompt, ... that are saved with the session."""
        if self.store is not None and self.session is not None:
            self.store.update(self.session, **fields)

    def rename(self, title: str) -> None:
        """Name the session `title`, even before it exists."""
        self.info.title = title
        self.update(title=title)

    def draft(self, text: str) -> None:
        """Save the text in the composer."""
        if self.store is not None:
            self.store.draft(self.session, text)

    def add_prompt(self, text: str) -> None:
        """Save a message that the user typed, to be found again in other conversations."""
        if self.store is not None:
            self.store.add_prompt(text)
