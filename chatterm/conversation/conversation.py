"""A conversation along the selected branch of a session: what is sent, what comes back, and what is saved of it.

It turns what is wanted into jobs for the backend and knows no screen. `headless.py` waits for each job,
`screen_conversation.py` shows what becomes of them.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Generic, TypeVar

from chatterm.backends.backend import Backend, Compaction, EngineError, Exchange, Outcome
from chatterm.backends.worker import Token
from chatterm.conversation.answer_in_progress import AnswerInProgress
from chatterm.conversation.session_tree import SessionTree, session_info
from chatterm.conversation.visible_history import compactions, seen, sees_last
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.tree import Tree

AnswerT = TypeVar("AnswerT", bound=AnswerInProgress)

Submit = Callable[..., object]
"""Has a method of Backend called with the arguments that follow it, now or later."""

BUSY = "An answer is running; Esc stops it."


class Conversation(Generic[AnswerT]):
    """A conversation. Methods that cannot do what is asked raise EngineError (one line) and change nothing."""

    def __init__(self, backend: Backend, submit: Submit, saved: SessionTree) -> None:
        self._backend = backend
        self._submit = submit
        self.saved = saved
        self.turn: AnswerT | None = None
        """The running answer; of several, the one in front."""
        self.sampling: dict[str, Any] = {}
        """Sampling settings chosen for this session."""
        self._running: dict[int, AnswerT] = {}
        """The running answers by their number at the worker."""
        self._held: list[tuple[int, str]] | None = []
        """The exchanges that the backend has as its history, by id and message; None: unknown."""
        self._kept_as: str | None = None

    # --- state ---

    @property
    def tree(self) -> Tree:
        return self.saved.tree

    @property
    def path(self) -> list[Exchange]:
        """The selected branch."""
        return self.saved.path

    @property
    def is_busy(self) -> bool:
        """Whether an answer runs or something waits for one."""
        return self.turn is not None

    def _refuse_while_busy(self) -> None:
        if self.is_busy:
            raise EngineError(BUSY)

    def _last(self, nothing: str) -> Exchange:
        """Return the last exchange of the branch; raise EngineError(nothing) if there is none."""
        if self.tree.head is None:
            raise EngineError(nothing)
        return self.tree[self.tree.head]

    def _unfinished(self) -> Exchange:
        """Return the last exchange, to continue its answer. Raises EngineError if that cannot be done."""
        last = self._last("There is no answer to continue; send a message first.")
        if not sees_last(self.path):
            raise EngineError("The model no longer sees this answer; /compact off shows it everything again.")
        if last.finish_reason in ("eos", "stop"):
            raise EngineError("The answer is complete; /retry generates another one.")
        return last

    def info(self) -> SessionInfo:
        """Return the description of this session, as it is saved or exported."""
        return session_info(self._backend, self.sampling)

    # --- branches ---

    def undo(self) -> str:
        """Go back before the last message that the user wrote, and return it; its branch stays in the session."""
        self._refuse_while_busy()
        last = self.tree.asked(self._last("There is nothing to undo."))
        self._go(last.parent)
        return last.user

    def redo(self, nothing: str = "There is nothing to redo.") -> str:
        """Go forward to the message undone last and what tools told after it, and return it.

        Raises EngineError(nothing) if there is none.
        """
        self._refuse_while_busy()
        if not (ahead := self.tree.ahead(self.tree.head)):
            raise EngineError(nothing)
        self._go([ahead[0], *takewhile(lambda exchange: exchange.results, ahead[1:])][-1].id)
        return ahead[0].user

    def _hold(self, path: Sequence[Exchange]) -> None:
        """Make the backend's history what the model is to see of this branch."""
        wanted = seen(path)
        if self._held != (names := _names(wanted)):
            self._submit(Backend.load_path, tuple(wanted))
            self._held = names

    def forget(self) -> None:
        """Mark the backend's history as unknown."""
        self._held = None

    def hold_again(self) -> None:
        """Give the history to a backend that may not have it, unless a message has done so already."""
        if self.turn is None and self._held is None:
            self._hold(self.path)

    def _go(self, head: int | None) -> None:
        self.saved.select(head)
        self._follow()

    def _follow(self, changed: Sequence[Exchange] = ()) -> None:
        """Hold and show the selected branch, in which the exchanges `changed` may look different now."""
        self._hold(self.path)
        self.show(changed)

    def show(self, changed: Sequence[Exchange] = ()) -> None:
        """Show the selected branch, in which the exchanges `changed` may look different, if there is a screen."""

    def show_pinned(self, exchange: Exchange) -> None:
        """Show whether this exchange of the selected branch is pinned, if there is a screen."""

    # --- what the model sees ---

    def compact(self, what: str) -> None:
        """Hide the whole branch from the model (`start`) or its attached files (`files`), or nothing (`off`).

        Pinned messages stay visible. Raises EngineError if there is nothing to change.
        """
        self._refuse_while_busy()
        self._compact(compactions(self.path, what))

    def summarise(self, exchange: Exchange, summary: Compaction) -> None:
        """Have the model see `summary` in place of everything up to and including `exchange`."""
        self._refuse_while_busy()
        self._compact([(exchange, summary)])

    def _compact(self, changes: Sequence[tuple[Exchange, Compaction | None]]) -> None:
        for exchange, compaction in changes:
            exchange.compaction = compaction
        self._change([exchange for exchange, _ in changes])

    def pin(self, exchange: Exchange) -> bool:
        """Pin or unpin a message with its answer; return whether it is pinned now."""
        self._refuse_while_busy()
        exchange.is_pinned = not exchange.is_pinned
        self.saved.save(exchange)
        self._hold(self.path)
        self.show_pinned(exchange)
        return exchange.is_pinned

    def _change(self, changed: Sequence[Exchange]) -> None:
        """Save exchanges of which the model sees something else now, and follow them."""
        for exchange in changed:
            self.saved.save(exchange)
        self._follow(changed)

    # --- the answer ---

    def _begin(self, parent: int | None, turns: Sequence[AnswerT]) -> None:
        """Save turns that the backend is about to answer, and have it hold what they follow."""
        if self.saved.store is not None and self.saved.session is None:
            self.saved.begin_session(self.info())
            self._name_cache()
        self._hold(self.tree.path(parent))
        self.turn, self._running = turns[0], dict(enumerate(turns))
        for turn in turns:
            turn.saved.save(turn.exchange)
        self.saved.select(turns[0].exchange.id)

    def begun(self, before: Outcome, index: int = 0) -> None:
        """Note that a running answer has begun or continues, and save the text that it starts from."""
        if (turn := self._running.get(index)) is not None:
            turn.begin(before)

    def take(self, tokens: Sequence[Token]) -> None:
        """Take and save the next tokens of the running answers."""
        for index in dict.fromkeys(token.index for token in tokens):
            if (turn := self._running.get(index)) is not None:
                latest = turn.before if turn.is_candidate else self._backend.last
                turn.take([token for token in tokens if token.index == index], latest)

    def _note(self, turn: AnswerT) -> None:
        """Save a finished answer."""
        if not turn.is_candidate:
            self._held = _names(seen(self.path))
        turn.saved.save(turn.exchange)

    def _withdraw(self, turn: AnswerT) -> None:
        """Remove an exchange whose answer never began, and go back to where its message came from."""
        was_head = turn.exchange.id == self.tree.head
        turn.saved.drop(turn.exchange)
        if was_head:
            self.forget()
            self._go(turn.fallback)

    # --- sessions ---

    def clear(self) -> None:
        """Begin a new conversation; this one stays saved."""
        self._use(SessionTree(self.saved.store))
        self._held = []
        self._name_cache()
        self._submit(Backend.reset)

    def _use(self, saved: SessionTree) -> None:
        self.saved = saved

    def _name_cache(self) -> None:
        """Have the backend keep the cache on disk under the name of this session."""
        if self.saved.session != self._kept_as:
            self._kept_as = self.saved.session
            self._submit(Backend.configure, {"kept_as": self._kept_as})


def _names(exchanges: Sequence[Exchange]) -> list[tuple[int, str]]:
    return [(exchange.id, exchange.user) for exchange in exchanges]
