"""The conversation as a tree of exchanges: what is sent, where it goes, what is shown and saved of it.

It turns what the person wants into jobs for the worker and knows no widget: the screen is a `View`.
"""

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

from chatterm.backends import worker
from chatterm.backends.backend import Backend, EngineError, Outcome, TurnStats
from chatterm.conversation.entries import AnswerEntry, Branch, Entry, UserEntry
from chatterm.conversation.figures import SessionStats
from chatterm.conversation.keeper import Keeper
from chatterm.conversation.turn import Turn, answer_of, stats_of
from chatterm.sessions.records import Exchange, SessionInfo
from chatterm.sessions.tree import Tree

_BUSY = "An answer is running; Esc stops it."


class View(Protocol):
    """What a conversation needs of the screen."""

    def show_path(self, entries: Sequence[Entry]) -> None:
        """These are the messages now, in this order."""

    def add(self, entry: Entry) -> None:
        """One more message, at the end."""

    def give_back(self, text: str) -> None:
        """Text that was not sent belongs into the composer again."""


class Conversation:
    """Methods that cannot do what is asked raise EngineError (one line) and change nothing."""

    def __init__(self, backend: Backend, thread: worker.Worker, keeper: Keeper, view: View) -> None:
        self._backend = backend
        self._worker = thread
        self._view = view
        self.keeper = keeper
        self.tree = Tree()
        self.turn: Turn | None = None
        self.waiting: deque[UserEntry] = deque()
        self.ended: Turn | None = None
        """The latest turn that is over, for its figures."""
        self.stats = SessionStats()
        self.process = SessionStats()
        """Sums over every session since the program began."""
        self.show_thinking: bool | None = None
        self.sampling: dict[str, Any] = {}
        """What was chosen for this session."""
        self._pairs: dict[int, tuple[UserEntry, AnswerEntry]] = {}
        self._held: list[int] | None = []
        """The exchanges that the backend's history holds; None: nobody knows."""
        self._seen: dict[tuple[int | None, str], int] = {}
        """By parent and message the answer that was looked at last."""

    # --- what there is ---

    @property
    def path(self) -> list[Exchange]:
        """The selected branch."""
        return self.tree.path(self.tree.head)

    def exchange_of(self, entry: Entry) -> Exchange | None:
        """The exchange on the selected branch that an entry belongs to."""
        return next((e for e in reversed(self.path) if entry in self._pairs.get(e.id, ())), None)

    def entries_of(self, exchange: Exchange) -> tuple[UserEntry, AnswerEntry]:
        """How an exchange is shown."""
        pair = self._pairs.get(exchange.id)
        if pair is None:
            answers = (self._pairs.get(e.id) for e in self._answers(exchange))
            shared = next((known[0] for known in answers if known), None)
            answer = answer_of(exchange, show_thinking=self.show_thinking)
            pair = self._pairs[exchange.id] = (shared or UserEntry(exchange.user), answer)
        return pair

    def _answers(self, exchange: Exchange) -> list[Exchange]:
        """The answers to the same message at the same place, oldest first."""
        return [other for other in self.tree.siblings(exchange.id) if other.user == exchange.user]

    def _messages(self, exchange: Exchange) -> list[str]:
        """The messages at this place, oldest first."""
        return list(dict.fromkeys(other.user for other in self.tree.siblings(exchange.id)))

    @property
    def last_answer(self) -> Exchange | None:
        """The last one of the selected branch, where the model that is loaded gave it."""
        info, head = self._backend.info, self.tree.head
        names = (self._backend.model, info.name if info is not None else "")
        return self.tree[head] if head is not None and self.tree[head].model in names else None

    @property
    def ended_here(self) -> Turn | None:
        """The latest turn that is over, while it is that of the last answer."""
        return self.ended if self.ended is not None and self.ended.exchange is self.last_answer else None

    @property
    def saved_stats(self) -> TurnStats | None:
        """The figures that are saved with the last answer."""
        return stats_of(self.last_answer) if self.last_answer is not None else None

    # --- sending ---

    def send(self, text: str, *, note: str) -> None:
        """Ask as soon as possible; `note` says why it has to wait, if it has."""
        entry = UserEntry(text)
        entry.note = note
        self.waiting.append(entry)
        self._view.add(entry)

    def next(self, model: str) -> None:
        """Send the message that waits longest."""
        if self.turn is not None or not self.waiting:
            return
        prompt = self.waiting.popleft()
        prompt.note = ""
        prompt.changed()
        self._ask(self.tree.head, prompt, model, fallback=self.tree.head)

    def edit(self, exchange: Exchange, text: str, model: str) -> None:
        """Ask `text` where `exchange` asks something else: a new branch."""
        self._refuse_while_busy()
        self._ask(exchange.parent, UserEntry(text), model, fallback=self.tree.head)

    def retry(self, exchange: Exchange, model: str) -> None:
        """Answer the message of `exchange` once more; its answer stays as a branch."""
        self._refuse_while_busy()
        prompt, _ = self.entries_of(exchange)
        self._ask(exchange.parent, prompt, model, fallback=self.tree.head, is_retry=True)

    def resume(self) -> None:
        """Go on with the last answer from exactly where it ended."""
        self._refuse_while_busy()
        if self.tree.head is None:
            raise EngineError("There is no answer to continue; send a message first.")
        exchange = self.tree[self.tree.head]
        if exchange.finish_reason in ("eos", "stop"):
            raise EngineError("The answer is complete; /retry generates another one.")
        prompt, answer = self.entries_of(exchange)
        answer.footer = []
        self._hold(exchange.id)
        turn = Turn(exchange, prompt, answer, monotonic(), fallback=exchange.id, is_resumed=True)
        self._begin(turn, worker.Resume())

    def _ask(
        self,
        parent: int | None,
        prompt: UserEntry,
        model: str,
        *,
        fallback: int | None,
        is_retry: bool = False,
    ) -> None:
        exchange = self.tree.add(parent, prompt.text, model)
        answer = AnswerEntry(show_thinking=self.show_thinking)
        self._pairs[exchange.id] = (prompt, answer)
        self.keeper.begin(self.new_info())
        self._hold(parent)
        turn = Turn(exchange, prompt, answer, monotonic(), fallback=fallback, is_retry=is_retry)
        self._begin(turn, worker.Send(prompt.text))

    def _begin(self, turn: Turn, job: worker.Send | worker.Resume) -> None:
        self.turn = turn
        turn.session = self.keeper.session
        turn.tick(turn.started, None)
        self._looked()
        self.keeper.save(turn.session, turn.exchange)
        self.keeper.head(turn.exchange.id)
        self.show()
        self._worker.submit(job)

    def new_info(self) -> SessionInfo:
        """What a session remembers besides its messages."""
        backend = self._backend
        return SessionInfo(
            model=backend.model,
            system=backend.system,
            think=backend.think,
            think_cache=backend.think_cache,
            sampling=dict(self.sampling),
        )

    def aim(self, exchange: Exchange | None) -> None:
        """What is being typed will be asked instead of `exchange`, or after everything: make that the history."""
        if self.turn is None and not self.waiting:
            self._hold(self.tree.head if exchange is None else exchange.parent)

    def _hold(self, head: int | None) -> None:
        """Make the backend's history the branch that ends with `head`."""
        path = self.tree.path(head)
        ids = [exchange.id for exchange in path]
        if ids != self._held:
            self._held = ids
            self._worker.submit(worker.LoadPath(tuple(path)))

    def _refuse_while_busy(self) -> None:
        if self.turn is not None or self.waiting:
            raise EngineError(_BUSY)

    # --- the answer ---

    def tick(self, now: float) -> bool:
        """Move what moves by itself; whether anything did."""
        return self.turn is not None and self.turn.tick(now, self._backend.figures())

    def begun(self, before: Outcome) -> None:
        """The running answer has begun, or goes on: save what it goes on from."""
        turn = self.turn
        if turn is not None:
            turn.begin(before)
            self.keeper.save(turn.session, turn.exchange)

    def take(self, tokens: Sequence[worker.Token]) -> None:
        """Show and save the next tokens of the running answer."""
        turn = self.turn
        if turn is None or not tokens:
            return
        events = turn.take(tokens)
        if (latest := self._backend.last) is not None:
            turn.note(latest)
        self.keeper.say(turn.session, turn.exchange, events)

    def stop(self) -> None:
        if self.turn is not None:
            self.turn.is_stopping = True
            self._worker.stop()

    def answered(self, outcome: Outcome | None, now: float) -> None:
        """The running answer is over."""
        turn, self.turn = self.turn, None
        if turn is None:
            return
        turn.end(outcome, now)
        if turn.is_dropped:
            self.keeper.save(turn.session, turn.exchange)
            return
        if turn.is_retry and not turn.has_begun and turn.is_stopping:
            self._withdraw(turn)
            return
        self._held = [exchange.id for exchange in self.path]
        self.keeper.save(turn.session, turn.exchange)
        self.ended = turn
        if turn.stats is not None:
            self.stats.add(turn.stats, retry=turn.is_retry)
            self.process.add(turn.stats, retry=turn.is_retry)
        if turn.is_undone:
            self.undo()

    def failed(self, now: float) -> None:
        """The running answer ended with an error. What was said is kept; a message that was refused is given back."""
        turn, self.turn = self.turn, None
        if turn is None:
            return
        if turn.has_begun or turn.is_resumed:
            self._held = None  # who knows how much of it the history holds
            turn.end(self._backend.last if turn.is_resumed and not turn.has_begun else None, now)
            self.keeper.save(turn.session, turn.exchange)
            if not turn.is_dropped:
                self._hold(self.tree.head)
        elif turn.is_dropped:
            self.keeper.drop(turn.session, turn.exchange.id)
        else:
            self._withdraw(turn)
            if not turn.is_retry:
                self._view.give_back(turn.prompt.text)

    def _withdraw(self, turn: Turn) -> None:
        """Nothing was said: the exchange was never there."""
        self.tree.drop(turn.exchange.id)
        self._pairs.pop(turn.exchange.id, None)
        self._held = None
        self.keeper.drop(turn.session, turn.exchange.id)
        self._go(turn.fallback)

    # --- branches ---

    def undo(self) -> bool:
        """Take the last message back into the composer; its branch stays. False when there is none."""
        if self.waiting:
            self.take_back()
        elif self.turn is not None:
            self.turn.is_undone = True
            self.stop()
        elif self.tree.head is None:
            return False
        else:
            last = self.tree[self.tree.head]
            self.ended = None
            self._go(last.parent)
            self._view.give_back(last.user)
        return True

    @property
    def undone(self) -> list[Exchange]:
        """What was taken back and can be shown again, next first."""
        return self.tree.ahead(self.tree.head)

    def redo(self) -> str | None:
        """Show the message again that was taken back last; its text. None where there is none."""
        self._refuse_while_busy()
        undone = self.undone
        if not undone:
            return None
        self._go(undone[0].id)
        return undone[0].user

    def take_back(self) -> None:
        """The message that waits, into the composer."""
        entry = self.waiting.pop()
        self.show()
        self._view.give_back(entry.text)

    def step(self, entry: Entry | None, side: int) -> Entry | None:
        """Go to the alternative before (-1) or after (1) a message, of the last one that has any for None.

        The entry that stands at the same place then; None when there is no other branch.
        """
        self._refuse_while_busy()
        exchange = self.exchange_of(entry) if entry is not None else None
        if exchange is None:
            exchange = next((e for e in reversed(self.path) if len(self.tree.siblings(e.id)) > 1), None)
        if exchange is None or len(self.tree.siblings(exchange.id)) < 2:
            return self._step_ahead() if entry is None and side > 0 else None
        answers, messages = self._answers(exchange), self._messages(exchange)
        of_message = len(answers) < 2 or (isinstance(entry, UserEntry) and len(messages) > 1)
        place = messages.index(exchange.user) if of_message else answers.index(exchange)
        place = min(max(place + side, 0), len(messages if of_message else answers) - 1)
        if of_message:
            same = [e.id for e in self.tree.siblings(exchange.id) if e.user == messages[place]]
            chosen = self._seen.get((exchange.parent, messages[place]), same[-1])
        else:
            chosen = answers[place].id
        self._go(self.tree.leaf(chosen))
        return self.entries_of(self.tree[chosen])[0 if of_message else 1]

    def _step_ahead(self) -> Entry | None:
        """Go to the end of what was taken back."""
        undone = self.undone
        if not undone:
            return None
        self._go(undone[-1].id)
        return self.entries_of(undone[0])[0]

    def _go(self, head: int | None) -> None:
        self.tree.select(head)
        self._looked()
        self.keeper.head(head)
        self._hold(head)
        self.show()

    def _looked(self) -> None:
        for exchange in self.path:
            self._seen[exchange.parent, exchange.user] = exchange.id

    # --- sessions ---

    def clear(self) -> None:
        """A new conversation; what runs is stopped and kept where it was."""
        self.stop()
        if self.turn is not None:
            self.turn.is_dropped = True
        while self.waiting:
            self.take_back()
        self.keeper.leave()
        self._begin_with(Tree())
        self._held = []
        self._worker.submit(worker.Reset())

    def open(self, session: str | None, tree: Tree) -> None:
        """Go on with a session that was saved."""
        self.stop()
        if self.turn is not None:
            self.turn.is_dropped = True
        while self.waiting:
            self.take_back()
        self.keeper.session = session
        self._begin_with(tree)
        self._held = None
        self._hold(tree.head)

    def hold_again(self) -> None:
        """Another model answers from now on: give it the history, unless a message has done so already."""
        if self.turn is None and self._held is None:
            self._hold(self.tree.head)

    def forget(self) -> None:
        """The backend may hold anything."""
        self._held = None

    def _begin_with(self, tree: Tree) -> None:
        self.tree = tree
        self._pairs, self._seen = {}, {}
        self.ended = None
        self.stats = SessionStats.of(exchange.stats for exchange in tree.exchanges)
        self._looked()
        self.show()

    # --- what is shown ---

    def show(self) -> None:
        """Bring the screen up to the selected branch."""
        entries: list[Entry] = []
        for exchange in self.path:
            prompt, answer = self.entries_of(exchange)
            self._mark(exchange, prompt, answer)
            entries += [prompt, answer]
        self._view.show_path([*entries, *self.waiting])

    def _mark(self, exchange: Exchange, prompt: UserEntry, answer: AnswerEntry) -> None:
        messages = of_answers = (1, 1)
        if len(self.tree.siblings(exchange.id)) > 1:
            names, answers = self._messages(exchange), self._answers(exchange)
            messages = (names.index(exchange.user) + 1, len(names))
            of_answers = (answers.index(exchange) + 1, len(answers))
        _set_branch(prompt, messages)
        _set_branch(answer, of_answers)


def _set_branch(entry: UserEntry | AnswerEntry, branch: Branch) -> None:
    if entry.branch != branch:
        entry.branch = branch
        entry.changed()
