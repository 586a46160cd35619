"""A conversation for programs without a screen: every call blocks, and answers are generators."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from chatterm.backends.backend import Backend, Document, TokenEvent, ToolResult
from chatterm.backends.worker import Token
from chatterm.conversation.answer_in_progress import AnswerInProgress
from chatterm.conversation.conversation import Conversation
from chatterm.conversation.session_tree import SessionTree
from chatterm.sessions.tool_calls_json import results_text

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore


class Talk(Conversation[AnswerInProgress]):
    """A conversation of one thread. Errors that the user can cause are EngineError and ModelError.

    An answer is a generator: closing it, or an interrupt in it, stops the answer and keeps the text so far. If it is
    refused, or stopped before any text, nothing changes.
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

        def call(method: Callable[..., object], *arguments: object) -> None:
            getattr(backend, method.__name__)(*arguments)

        super().__init__(backend, call, SessionTree(store, session))
        if store is not None and session is not None:
            self.saved.info, self.saved.tree, _ = store.load(session)
        self.sampling = dict(sampling or {})

    def begin(self) -> None:
        """Hand the history to the backend. Call it once the model is loaded, and again after a switch."""
        self._name_cache()
        if self.path:
            self.forget()
            self.hold_again()

    def ask(self, text: str) -> Generator[TokenEvent, None, None]:
        """Send a message."""
        return self._ask(self.tree.head, text)

    def tell(self, results: Sequence[ToolResult]) -> Generator[TokenEvent, None, None]:
        """Continue with the results of the last answer's tool calls."""
        return self._ask(self.tree.head, results_text(results), results)

    def keep(self, results: Sequence[ToolResult]) -> None:
        """Save the results of the last answer's tool calls, if the user stopped before the model was told."""
        turn = self._add(self.tree.head, results_text(results), results)
        turn.finish(None)
        turn.saved.save(turn.exchange)
        self.saved.select(turn.exchange.id)
        self.forget()

    def retry(self) -> Generator[TokenEvent, None, None]:
        """Answer the last message again; the present answer stays as another branch."""
        last = self._last("There is no message to answer again; send one first.")
        return self._ask(last.parent, last.user, last.results)

    def resume(self) -> Generator[TokenEvent, None, None]:
        """Continue the last answer from where it ended."""
        exchange = self._unfinished()
        return self._run(
            exchange.id, AnswerInProgress(self.saved, exchange, is_resumed=True), self._backend.resume
        )

    def begin_on(self, documents: Sequence[Document]) -> None:
        """Begin a new conversation on these; this one stays saved. If they do not fit: raise ContextFullError."""
        self._backend.configure({"documents": tuple(documents)})
        self.clear()

    # --- internals ---

    def _add(self, parent: int | None, text: str, results: Sequence[ToolResult]) -> AnswerInProgress:
        fallback = self.tree.head
        exchange = self.saved.add(parent, text, self._backend.model, results)
        return AnswerInProgress(self.saved, exchange, fallback=fallback)

    def _ask(
        self, parent: int | None, text: str, results: Sequence[ToolResult] = ()
    ) -> Generator[TokenEvent, None, None]:
        turn = self._add(parent, text, results)
        answer = partial(self._backend.tell, results) if results else partial(self._backend.send, text)
        yield from self._run(parent, turn, answer)

    def _run(
        self, parent: int | None, turn: AnswerInProgress, answer: Callable[[], Iterator[TokenEvent]]
    ) -> Generator[TokenEvent, None, None]:
        """Yield the events of an answer after `parent`; the exchange takes and saves them."""
        is_over = False
        try:
            self._begin(parent, [turn])
            # The backend's iterators are generators: closing one cancels, and keeps what was produced.
            with closing(cast("Generator[TokenEvent, None, None]", answer())) as events:
                for event in events:
                    if turn.before is None and (latest := self._backend.last) is not None:
                        self.begun(latest.before(event))
                    self.take([Token(monotonic(), event)])
                    yield event
            is_over = True
        finally:
            self.turn, self._running = None, {}
            if is_over or turn.has_begun:
                turn.finish(self._backend.last)
                self._note(turn)
            elif not turn.is_resumed:
                self._withdraw(turn)
