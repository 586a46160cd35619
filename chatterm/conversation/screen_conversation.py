"""The conversation of a screen: messages that wait for their turn, tool calls, candidates, and sums of figures.

It knows no widget: the screen is a `View`.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from chatterm.backends.backend import Backend, EngineError, Exchange, Outcome, ToolResult
from chatterm.backends.worker import Worker
from chatterm.conversation.branching import Branching, Prepared
from chatterm.conversation.conversation import BUSY
from chatterm.conversation.ending import Ending
from chatterm.conversation.entries import AnswerEntry, RetryEntry, UserEntry
from chatterm.conversation.figures import SessionStats
from chatterm.conversation.session_tree import SessionTree, session_info
from chatterm.conversation.tool_entry import ToolsEntry
from chatterm.conversation.turn import RunningTurn
from chatterm.conversation.view import View
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.tree import Tree


class ScreenConversation(Branching):
    """A conversation on a screen."""

    def __init__(self, backend: Backend, thread: Worker, saved: SessionTree, view: View) -> None:
        super().__init__(backend, thread, saved, view)
        self._worker = thread
        self.documents = backend.options.documents
        """The documents at its start, once the backend has processed its jobs."""
        self.is_leaving = False
        """Whether another conversation is about to begin: messages wait for it."""
        self.stats = SessionStats()
        self.process = SessionStats()
        """Sums over every session since the program began."""

    # --- sending ---

    def send(self, text: str, *, note: str) -> None:
        """Queue a message, to be sent as soon as possible; `note` says why it has to wait, if it has."""
        self._queue(UserEntry(text), note)

    def next(self, model: str) -> None:
        """Run the oldest entry of the queue: send its message, or do its retry."""
        if self.is_answering or not self.waiting or self.is_leaving:
            return
        prompt = self.waiting.popleft()
        if isinstance(prompt, RetryEntry):
            self.show()
            latest = self.tree[self.tree.head] if self.tree.head is not None else None
            if (exchange := prompt.exchange or latest) is not None:
                self._retry(exchange, [model] * prompt.count)
            return
        prompt.note = ""
        prompt.changed()
        self._ask(self.tree.head, prompt, [model])

    def edit(self, exchange: Exchange, text: str, model: str) -> None:
        """Send `text` in place of the message of `exchange`, as a new branch."""
        self._refuse_while_busy()
        self._ask(exchange.parent, UserEntry(text), [model])

    def retry(self, exchange: Exchange, model: str, count: int = 1) -> None:
        """Answer the message of `exchange` again, `count` times at once; its answer stays as a branch."""
        self._refuse_while_busy()
        self._retry(exchange, [model] * count)

    def retry_later(self, exchange: Exchange | None, count: int) -> None:
        """Queue a retry of `exchange`; None means whichever exchange is last when its turn comes."""
        self._queue(RetryEntry(exchange, count), "waits for the answer")

    def _queue(self, entry: UserEntry, note: str) -> None:
        entry.note = note
        self.waiting.append(entry)
        self._view.add(entry)

    def _retry(self, exchange: Exchange, models: Sequence[str]) -> None:
        prompt, _ = self.entries_of(exchange)
        if exchange.results and len(models) > 1:
            raise EngineError(
                "Tool results can only be answered once at a time; use /retry without a number."
            )
        self._ask(exchange.parent, prompt, models, is_retry=True, results=exchange.results)

    # --- tools ---

    def act(self) -> ToolsEntry | None:
        """Begin the tool calls of a complete last answer and return their entry; None if nothing can begin now."""
        calls = self.tree.open_calls
        if self.turn is not None or self.choice or not calls:
            return None
        self.acting = ToolsEntry(calls)
        self.show()
        return self.acting

    def tell(self, results: Sequence[ToolResult], model: str, *, is_stopped: bool = False) -> None:
        """Continue with the results of the calls; if the user stopped them (`is_stopped`), only save those."""
        entry, self.acting = self.acting, None
        if entry is None or self.tree.head is None:
            return
        entry.finish(results)
        self._ask(self.tree.head, entry, [model], results=results, is_kept=is_stopped)

    def compare(self, exchange: Exchange, model: str, other: str) -> None:
        """Have `model`, which is loaded, and `other` answer the message of `exchange`, both at once."""
        self._refuse_while_busy()
        if exchange.results:
            raise EngineError(
                "Results of tools are answered by one model at a time; /model chooses another one."
            )
        self._retry(exchange, [model, other])

    def keep(self, chosen: RunningTurn) -> None:
        """Continue with this candidate. The others stop if they still run; all stay as branches."""
        number = next((number for number, turn in self._running.items() if turn is chosen), None)
        others = [turn for turn in self._running.values() if turn is not chosen]
        for turn in others:
            turn.is_stopping = True
        if others:
            self._worker.stop(but=number)
        self.choice = []
        if number is None:
            self.ended = chosen
            return self._go(chosen.exchange.id)
        self.turn = chosen
        self.saved.select(chosen.exchange.id)  # the history gets it once it is over
        return self.show()

    def choose_none(self) -> None:
        """Go back to the answer that was there before the candidates, which stay as branches."""
        chosen, self.choice = self.choice[:1], []
        for turn in chosen:
            self._go(turn.fallback)

    def resume(self) -> None:
        """Continue the last answer from exactly where it ended."""
        self._refuse_while_busy()
        exchange = self._unfinished()
        prompt, answer = self.entries_of(exchange)
        answer.footer, answer.ending = [], Ending()
        turn = RunningTurn(
            self.saved, exchange, prompt, answer, monotonic(), fallback=exchange.id, is_resumed=True
        )
        self._begin(exchange.id, [turn])
        self._submit(Backend.resume)

    def _ask(
        self,
        parent: int | None,
        prompt: UserEntry,
        models: Sequence[str],
        *,
        is_retry: bool = False,
        results: Sequence[ToolResult] = (),
        is_kept: bool = False,
    ) -> None:
        """Begin to answer `prompt` with each of `models` at once: the one that is loaded, maybe several times, or that
        and another one. `results` of tools are sent instead of a message; with `is_kept` they are only saved.
        """
        turns: list[RunningTurn] = []
        fallback = self.tree.head
        for name in models:
            exchange = self.saved.add(parent, prompt.text, name, results)
            answer = AnswerEntry(show_thinking=self.show_thinking)
            answer.can_answer_now = not self.is_remote
            self._shown.put(exchange, prompt, answer)
            how = {"is_retry": is_retry, "is_candidate": len(models) > 1}
            turns.append(
                RunningTurn(self.saved, exchange, prompt, answer, monotonic(), fallback=fallback, **how)
            )
        if is_kept:
            turns[0].end(None, monotonic())
            self.saved.save(turns[0].exchange)
            self._go(turns[0].exchange.id)
            return
        if len(models) > 1:
            self.choice = turns.copy()
        self._begin(parent, turns)
        if results:
            self._submit(Backend.tell, tuple(results))
        elif len(models) == 1:
            self._submit(Backend.send, prompt.text)
        elif models[1] == models[0]:
            self._submit(Backend.candidates, prompt.text, len(models))
        else:
            self._submit(Backend.compare, prompt.text, models[1], tuple(self.tree.path(parent)))

    def _begin(self, parent: int | None, turns: Sequence[RunningTurn]) -> None:
        for turn in turns:
            turn.tick(turn.started, None)
        super()._begin(parent, turns)
        self.show()

    def info(self) -> SessionInfo:
        """Return the description of this session, as it is saved or exported."""
        path = self.path
        return replace(
            session_info(self._backend, self.sampling, self.documents),
            title=self.title,
            created=path[0].created if path else 0.0,
            updated=max((exchange.created for exchange in self.tree.exchanges), default=0.0),
        )

    def aim(self, exchange: Exchange | None) -> None:
        """Make the history what a message typed now would follow: it replaces that of `exchange`, or comes last."""
        if not self.is_busy:
            self._hold(self.path if exchange is None else self.tree.path(exchange.parent))

    # --- the answer ---

    def tick(self, now: float) -> bool:
        """Update the clocks and progress of running answers; return whether anything changed."""
        figures = self._backend.figures() if self._running else None
        moved = [
            turn.tick(now, figures, self._backend.waiting(index)) for index, turn in self._running.items()
        ]
        return any(moved)

    def stop(self) -> None:
        if self._running:
            for turn in self._running.values():
                turn.is_stopping = True
            self._worker.stop()

    def take_back_last(self) -> bool:
        """Take the last message back into the composer; its branch stays. Return False if there is none."""
        if self.waiting:
            self.take_back()
        elif self.acting is not None:
            raise EngineError(BUSY)
        elif self.turn is not None:
            self.turn.is_undone = True
            self.stop()
        elif not self.path:
            return False
        else:
            self.ended = None
            self._view.give_back(self.undo())
        return True

    def answered(self, outcome: Outcome | None, now: float, index: int = 0, problem: str = "") -> None:
        """Finish a running answer; `problem` is the error that ended it, if any."""
        turn = self._running.pop(index, None)
        if turn is None:
            return
        if self.turn is turn:
            self.turn = next(iter(self._running.values()), None)
        turn.problem = problem
        turn.end(outcome, now)
        if turn.is_dropped:
            turn.saved.save(turn.exchange)
            return
        if not turn.has_begun and (turn.is_candidate or (turn.is_retry and turn.is_stopping)):
            self._withdraw(turn)
        else:
            self._note(turn)
        if turn.is_undone:
            self.take_back_last()
        elif turn.is_candidate and not self._running and not self.choice:
            self._hold(self.path)

    def _note(self, turn: RunningTurn) -> None:
        """Save a finished answer, and add its figures to the sums."""
        super()._note(turn)
        self.ended = turn
        if turn.stats is not None:
            for sums in (self.stats, self.process):
                sums.add(turn.stats, retry=turn.is_retry, resumed=turn.is_resumed)

    def failed(self, now: float, problem: str = "") -> None:
        """End all running answers after an error. Text that arrived is kept; a refused message is given back."""
        turns, self._running, self.turn = list(self._running.values()), {}, None
        for turn in turns:
            turn.problem = problem
            self._fail(turn, now)

    def _fail(self, turn: RunningTurn, now: float) -> None:
        is_left = turn.is_dropped and not turn.is_retry  # there is nobody to give the message back to
        if turn.has_begun or turn.is_resumed or turn.exchange.results or is_left:
            self.forget()  # how much of it the history holds is unknown
            turn.end(self._backend.last if turn.is_resumed and not turn.has_begun else None, now)
            turn.saved.save(turn.exchange)
            if not turn.is_dropped:
                self._hold(self.path)
        elif turn.is_dropped:
            turn.saved.drop(turn.exchange)
        else:
            self._withdraw(turn)
            if not turn.is_retry:
                self.take_all_back()  # they may be about the refused message
                self._view.give_back(turn.prompt.text)

    def _withdraw(self, turn: RunningTurn) -> None:
        """Remove an exchange whose answer never began. The other candidates, if any, can still be chosen."""
        self._shown.drop(turn.exchange)
        self.choice = [other for other in self.choice if other is not turn]
        if self.choice:
            turn.saved.drop(turn.exchange)
            self.saved.select(self.choice[0].exchange.id)
            self.show()
        else:
            super()._withdraw(turn)

    # --- sessions ---

    def clear(self) -> None:
        """Begin a new conversation; running answers are stopped and kept in the old one."""
        self._drop()
        self.take_all_back()
        super().clear()

    def _drop(self) -> None:
        """Stop the running answers and keep them where they are."""
        self.stop()
        self.choice, self.acting = [], None
        for turn in self._running.values():
            turn.is_dropped = True

    def open(self, session: str | None, tree: Tree, title: str = "", made: Prepared | None = None) -> None:
        """Continue a saved session; `made` holds what was prepared of it."""
        self._drop()
        self._use(SessionTree(self.saved.store, session, tree, SessionInfo(title=title)), made)
        self.take_all_back()
        self._name_cache()
        self.forget()
        self._hold(self.path)

    def _use(self, saved: SessionTree, made: Prepared | None = None) -> None:
        made = made or self.prepared(saved.tree)
        super()._use(saved)
        self._shown, self.stats = made.shown, made.stats
        self.ended = None
        self.show(made=made.entries)
