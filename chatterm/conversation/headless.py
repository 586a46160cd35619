"""A conversation along one branch of a session, for programs without a screen; it is saved as it happens."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
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
from chatterm.conversation.session_tree import SessionTree, session_info
from chatterm.conversation.visible_history import compactions, seen
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.tool_calls_json import results_text
from chatterm.sessions.tree import Tree

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore


class Talk(SessionTree):
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
        super().__init__(store, session)
        if store is not None and session is not None:
            self.info, self.tree, _ = store.load(session)
        self._backend = backend
        self.sampling = dict(sampling or {})

    def begin(self) -> None:
        """Hand the history to the backend. Call it once the model is loaded, and again after a switch."""
        if self.store is not None and self.session is not None:
            self._backend.configure({"kept_as": self.session})
        if self.tree.head is not None:
            self._hold(self.tree.head)

    def ask(self, text: str) -> Generator[TokenEvent, None, None]:
        """Send a message. If it is refused, nothing changes."""
        return self._new(self.tree.head, text)

    def tell(self, results: Sequence[ToolResult]) -> Generator[TokenEvent, None, None]:
        """Continue with the results of the last answer's tool calls."""
        return self._new(self.tree.head, results_text(results), results)

    def keep(self, results: Sequence[ToolResult]) -> None:
        """Save the results of the last answer's tool calls, if the user stopped before the model was told."""
        exchange = self._add(self.tree.head, results_text(results), results)
        self._end(exchange, None)
        self.select(exchange.id)

    def retry(self) -> Generator[TokenEvent, None, None]:
        """Answer the last message again; the present answer stays as another branch."""
        last = self.last("There is no message to answer again; send one first.")
        self._hold(last.parent)
        return self._new(last.parent, last.user, last.results)

    def resume(self) -> Generator[TokenEvent, None, None]:
        """Continue the last answer from where it ended."""
        return self._run(self.unfinished(), self._backend.resume())

    def undo(self) -> str:
        """Go back before the last message and return it; its branch stays in the session."""
        return self._gone_to(self.go_back(), "There is nothing to undo.")

    def redo(self) -> str:
        """Go forward again to the message undone last, and return it."""
        return self._gone_to(self.go_forward(), "There is nothing to redo.")

    def compact(self, what: str) -> None:
        """Set what the model sees from now on: nothing of the past (`start`), no files (`files`), all (`off`)."""
        self.set_compactions(compactions(self.path, what))
        self._hold(self.tree.head)

    def pin(self, which: str) -> str:
        """Pin or unpin the n-th message (default: the last); return a line that says which."""
        is_pinned = self.toggle_pin(nth(self.path, which or "-1"))
        self._hold(self.tree.head)
        return PINNED[is_pinned]

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

    # --- internals ---

    def _hold(self, head: int | None) -> None:
        """Make the backend's history the branch that ends with `head`."""
        self._backend.load_path(seen(self.tree.path(head)))

    def _gone_to(self, exchange: Exchange | None, nothing: str) -> str:
        if exchange is None:
            raise EngineError(nothing)
        self._hold(self.tree.head)
        return exchange.user

    def _add(self, parent: int | None, text: str, results: Sequence[ToolResult] = ()) -> Exchange:
        exchange = self.add(parent, text, self._backend.model, results)
        if self.store is not None and self.session is None:
            self.begin_session(session_info(self._backend, self.sampling))
            self._backend.configure({"kept_as": self.session})
        return exchange

    def _new(
        self, parent: int | None, text: str, results: Sequence[ToolResult] = ()
    ) -> Generator[TokenEvent, None, None]:
        before = self.tree.head
        exchange = self._add(parent, text, results)
        self.save(exchange)
        self.select(exchange.id)
        began = False
        try:
            asked = self._backend.tell(results) if results else self._backend.send(text)
            for event in self._run(exchange, asked):
                began = True
                yield event
        except BaseException:
            if not began:  # refused, or stopped before any text: remove it
                self.drop(exchange)
                self.select(before)
                self._hold(before)
            raise
        self._end(exchange, self._backend.last)

    def _run(self, exchange: Exchange, events: Iterator[TokenEvent]) -> Generator[TokenEvent, None, None]:
        """Yield the events, and save the exchange as they change it."""
        began = False
        try:
            # The backend's iterators are generators: closing one cancels, and keeps what was produced.
            with closing(cast("Generator[TokenEvent, None, None]", events)):
                for event in events:
                    latest = self._backend.last
                    if latest is not None:
                        if not began:
                            exchange.take(latest.before(event))
                            self.save(exchange)
                        exchange.stats, exchange.ends_at = latest.stats.to_dict(), latest.ends_at
                        self.say(exchange, (event,))
                    began = True
                    yield event
        finally:
            if began:
                self._end(exchange, self._backend.last)

    def _end(self, exchange: Exchange, latest: Outcome | None) -> None:
        """Save an answer that has ended."""
        if latest is not None:
            exchange.take(latest)
        if exchange.finish_reason is None:
            exchange.finish_reason = str(FinishReason.CANCELLED)
        self.save(exchange)
