"""A conversation along one branch of a session, for programs without a screen; it is saved as it happens."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from chatterm.backends.backend import (
    Backend,
    Document,
    EngineError,
    Exchange,
    FinishReason,
    Outcome,
    TokenEvent,
    ToolResult,
)
from chatterm.conversation.compaction import PINNED, nth
from chatterm.conversation.session_writer import session_info
from chatterm.conversation.visible_history import compacted, seen, sees_last
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.tool_calls_json import results_text
from chatterm.sessions.tree import Tree

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore


class Talk:
    """A conversation of one thread; every call blocks. Errors that the user can cause are EngineError and ModelError.

    An answer is a generator: closing it, or an interrupt in it, stops the answer and keeps the text so far.
    """

    def __init__(
        self,
        backend: Backend,
        store: "SessionStore | None" = None,
        session: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue `session`, or begin a new one with this `sampling`. Without a `store` nothing is saved.

        Raises SessionError if `session` cannot be read.
        """
        self._backend = backend
        self._store = store
        self.sampling = dict(sampling or {})
        self.session = session
        """The session that is written; None before the first message."""
        self.info = SessionInfo()
        self.tree = Tree()
        if store is not None and session is not None:
            self.info, self.tree, _ = store.load(session)

    @property
    def path(self) -> list[Exchange]:
        """The exchanges of the branch."""
        return self.tree.path(self.tree.head)

    def begin(self) -> None:
        """Hand the history to the backend. Call it once the model is loaded, and again after a switch."""
        if self._store is not None and self.session is not None:
            self._backend.configure({"kept_as": self.session})
        if self.tree.head is not None:
            self._backend.load_path(seen(self.path))

    def ask(self, text: str) -> Generator[TokenEvent, None, None]:
        """Send a message. If it is refused, nothing changes."""
        return self._new(self.tree.head, text)

    def tell(self, results: Sequence[ToolResult]) -> Generator[TokenEvent, None, None]:
        """Continue with the results of the last answer's tool calls."""
        return self._new(self.tree.head, results_text(results), results)

    def keep(self, results: Sequence[ToolResult]) -> None:
        """Save the results of the last answer's tool calls, if the user stopped before the model was told."""
        exchange = self.tree.add(self.tree.head, results_text(results), self._backend.model)
        exchange.results = list(results)
        self._open_session()
        self._save(exchange, None, ended=True)

    def retry(self) -> Generator[TokenEvent, None, None]:
        """Answer the last message again; the present answer stays as another branch."""
        last = self._last("There is no message to answer again; send one first.")
        self._backend.load_path(seen(self.tree.path(last.parent)))
        return self._new(last.parent, last.user, last.results)

    def resume(self) -> Generator[TokenEvent, None, None]:
        """Continue the last answer from where it ended."""
        last = self._last("There is no answer to continue; send a message first.")
        if not sees_last(self.path):
            raise EngineError("The model no longer sees this answer; /compact off shows it everything again.")
        return self._run(last, self._backend.resume())

    def undo(self) -> str:
        """Go back before the last message and return it; its branch stays in the session."""
        last = self.tree.asked(self._last("There is nothing to undo."))
        self._go(last.parent)
        return last.user

    def redo(self) -> str:
        """Go forward again to the message undone last, and return it."""
        ahead = self.tree.ahead(self.tree.head)
        if not ahead:
            raise EngineError("There is nothing to redo.")
        self._go(ahead[0].id)
        return ahead[0].user

    def compact(self, what: str) -> None:
        """Set what the model sees from now on: nothing of the past (`start`), no files (`files`), all (`off`)."""
        last = self._last("There is nothing to compact yet.")
        changed = [last]
        if what == "off":
            changed = [exchange for exchange in self.path if exchange.compaction is not None]
            for exchange in changed:
                exchange.compaction = None
        else:
            last.compaction = compacted(last, what)
        for exchange in changed:
            self._save(exchange, None)
        self._go(last.id)

    def pin(self, which: str) -> str:
        """Pin or unpin the n-th message (default: the last); return a line that says which."""
        exchange = nth(self.path, which or "-1")
        exchange.is_pinned = not exchange.is_pinned
        head = self.tree.head
        self._save(exchange, None)
        self._go(head)
        return PINNED[exchange.is_pinned]

    def reset(self) -> None:
        """Begin a new conversation; this one stays saved."""
        if self.session is not None:
            self._backend.configure({"kept_as": None})
        self.session, self.info, self.tree = None, SessionInfo(), Tree()
        self._backend.reset()

    def begin_on(self, documents: Sequence[Document]) -> None:
        """Begin a new conversation on these; this one stays saved. If they do not fit: raise ContextFullError."""
        self._backend.configure({"documents": tuple(documents)})
        self.reset()

    @property
    def database(self) -> Path | None:
        """The database file; None if nothing is saved."""
        return self._store.path if self._store is not None else None

    def update(self, **fields: Any) -> None:
        """Change the title, the system prompt, ... that are saved with the session."""
        if self._store is not None and self.session is not None:
            self._store.update(self.session, **fields)

    def remember(self, text: str) -> None:
        """Save a message that the user typed, to be found again in other conversations."""
        if self._store is not None:
            self._store.add_prompt(text)

    def rename(self, title: str) -> None:
        """Name the session `title`, even before it exists."""
        self.info.title = title
        self.update(title=title)

    @property
    def problem(self) -> str:
        """A line while data stays in memory only, and once if the session was deleted elsewhere; otherwise ""."""
        if self._store is None:
            return ""
        return self._store.problem or (self._store.was_deleted(self.session) if self.session else "")

    # --- internals ---

    def _last(self, nothing: str) -> Exchange:
        if self.tree.head is None:
            raise EngineError(nothing)
        return self.tree[self.tree.head]

    def _new(
        self, parent: int | None, text: str, results: Sequence[ToolResult] = ()
    ) -> Generator[TokenEvent, None, None]:
        before = self.tree.head
        exchange = self.tree.add(parent, text, self._backend.model)
        exchange.results = list(results)
        self._open_session()
        self._save(exchange, None)
        began = False
        try:
            asked = self._backend.tell(results) if results else self._backend.send(text)
            for event in self._run(exchange, asked):
                began = True
                yield event
        except BaseException:
            if not began:  # refused, or stopped before any text: remove it
                self.tree.drop(exchange.id)
                if self._store is not None and self.session is not None:
                    self._store.drop(self.session, exchange.id)
                self._go(before)
            raise
        self._save(exchange, self._backend.last, ended=True)

    def _run(self, exchange: Exchange, events: Iterator[TokenEvent]) -> Generator[TokenEvent, None, None]:
        """Yield the events, and save the exchange as they change it."""
        began = False
        try:
            # The backend's iterators are generators: closing one cancels, and keeps what was produced.
            with closing(cast("Generator[TokenEvent, None, None]", events)):
                for event in events:
                    latest = self._backend.last
                    if not began and latest is not None:
                        self._save(exchange, latest.before(event))
                    began = True
                    if latest is not None and self._store is not None and self.session is not None:
                        exchange.stats, exchange.ends_at = latest.stats.to_dict(), latest.ends_at
                        self._store.say(self.session, exchange, (event,))
                    yield event
        finally:
            if began:
                self._save(exchange, self._backend.last, ended=True)

    def _go(self, head: int | None) -> None:
        self.tree.select(head)
        if self._store is not None and self.session is not None:
            self._store.head(self.session, head)
        self._backend.load_path(seen(self.path))

    def _open_session(self) -> None:
        backend = self._backend
        if self._store is None:
            return
        if self.session is None:
            self.info = replace(session_info(backend, self.sampling), title=self.info.title)
            self.session = self._store.new(self.info)
            backend.configure({"kept_as": self.session})

    def _save(self, exchange: Exchange, latest: Outcome | None, ended: bool = False) -> None:
        if latest is not None:
            exchange.take(latest)
        if ended and exchange.finish_reason is None:
            exchange.finish_reason = str(FinishReason.CANCELLED)
        if self._store is not None and self.session is not None:
            self._store.save(self.session, exchange)
            self._store.head(self.session, exchange.id)
