"""The conversation as a tree of exchanges: what is sent, where it goes, what is shown and saved of it.

It turns what the person wants into jobs for the worker and knows no widget: the screen is a `View`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from chatterm.backends import worker
from chatterm.backends.backend import Backend, Compaction, EngineError, Exchange, Outcome, TurnStats
from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.conversation.figures import SessionStats
from chatterm.conversation.keeper import Keeper
from chatterm.conversation.seen import Held, sees_last, summarised
from chatterm.conversation.shown import Shown
from chatterm.conversation.turn import Turn, stats_of
from chatterm.conversation.view import View
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.titles import title_of
from chatterm.sessions.tree import Tree

_BUSY = "An answer is running; Esc stops it."


class Conversation:
    """Methods that cannot do what is asked raise EngineError (one line) and change nothing."""

    def __init__(self, backend: Backend, thread: worker.Worker, keeper: Keeper, view: View) -> None:
        self._backend = backend
        self._worker = thread
        self._view = view
        self.keeper = keeper
        self.tree = Tree()
        self.turn: Turn | None = None
        """The answer that runs; of several the one in front."""
        self.choice: list[Turn] = []
        """Candidates among which the person is to choose; some may run. [] where there is nothing to choose."""
        self._running: dict[int, Turn] = {}
        """What runs, by the worker's number of it."""
        self.waiting: deque[UserEntry] = deque()
        self.ended: Turn | None = None
        """The latest turn that is over, for its figures."""
        self.stats = SessionStats()
        self.process = SessionStats()
        """Sums over every session since the program began."""
        self.show_thinking: bool | None = None
        self.sampling: dict[str, Any] = {}
        """What was chosen for this session."""
        self.given_title = ""
        """That of the session, where it has one."""
        self._shown = Shown(self.tree)
        self._held = Held(thread)
        self._seen: dict[tuple[int | None, str], int] = {}
        """By parent and message the answer that was looked at last."""

    # --- what there is ---

    @property
    def path(self) -> list[Exchange]:
        """The selected branch."""
        return self.tree.path(self.tree.head)

    @property
    def title(self) -> str:
        """That of the session, else the first words; "" before it begins."""
        first = next(iter(self.path), None)
        return self.given_title or (title_of(first.user) if first is not None else "")

    def exchange_of(self, entry: Entry) -> Exchange | None:
        """The exchange on the selected branch that an entry belongs to."""
        return self._shown.exchange_of(entry)

    def entries_of(self, exchange: Exchange) -> tuple[UserEntry, AnswerEntry]:
        """How an exchange is shown."""
        return self._shown.entries_of(exchange, show_thinking=self.show_thinking)

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

    def retry(self, exchange: Exchange, model: str, count: int = 1) -> None:
        """Answer the message of `exchange` once more, or so many times at once; its answer stays as a branch."""
        self._refuse_while_busy()
        prompt, _ = self.entries_of(exchange)
        self._ask(exchange.parent, prompt, model, fallback=self.tree.head, is_retry=True, count=count)

    def keep(self, chosen: Turn) -> None:
        """Of the candidates go on with this one. Those that still run stop; all stay as branches."""
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
        self._select(chosen.exchange.id)  # the history gets it once it is over
        return self.show()

    def choose_none(self) -> None:
        """Go back to the answer that was there before the candidates, which stay as branches."""
        chosen, self.choice = self.choice[:1], []
        for turn in chosen:
            self._go(turn.fallback)

    def resume(self) -> None:
        """Go on with the last answer from exactly where it ended."""
        self._refuse_while_busy()
        if self.tree.head is None:
            raise EngineError("There is no answer to continue; send a message first.")
        exchange = self.tree[self.tree.head]
        if exchange.finish_reason in ("eos", "stop"):
            raise EngineError("The answer is complete; /retry generates another one.")
        if not sees_last(self.path):
            raise EngineError(
                "The model does not see this answer any more; /compact off shows it everything again."
            )
        prompt, answer = self.entries_of(exchange)
        answer.footer = []
        self._hold(exchange.id)
        turn = Turn(exchange, prompt, answer, monotonic(), fallback=exchange.id, is_resumed=True)
        self._begin([turn], worker.Resume())

    def _ask(
        self,
        parent: int | None,
        prompt: UserEntry,
        model: str,
        *,
        fallback: int | None,
        is_retry: bool = False,
        count: int = 1,
    ) -> None:
        turns: list[Turn] = []
        for _ in range(count):
            exchange = self.tree.add(parent, prompt.text, model)
            answer = AnswerEntry(show_thinking=self.show_thinking)
            self._shown.put(exchange, prompt, answer)
            of_several = {"is_retry": is_retry, "is_candidate": count > 1}
            turns.append(Turn(exchange, prompt, answer, monotonic(), fallback=fallback, **of_several))
        self.keeper.begin(self.new_info())
        self._hold(parent)
        if count > 1:
            self.tree.select(turns[0].exchange.id)
            self.choice = turns.copy()
        self._begin(turns, worker.Send(prompt.text) if count == 1 else worker.Draw(prompt.text, count))

    def _begin(self, turns: Sequence[Turn], job: worker.Send | worker.Resume | worker.Draw) -> None:
        self.turn, self._running = turns[0], dict(enumerate(turns))
        for turn in turns:
            turn.session = self.keeper.session
            turn.tick(turn.started, None)
            self.keeper.save(turn.session, turn.exchange)
        self._looked()
        self.keeper.head(turns[0].exchange.id)
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

    def info(self) -> SessionInfo:
        """What there is to say about this session in an export."""
        path = self.path
        return replace(self.new_info(), title=self.title, created=path[0].created if path else 0.0)

    def aim(self, exchange: Exchange | None) -> None:
        """What is being typed will be asked instead of `exchange`, or after everything: make that the history."""
        if self.turn is None and not self.waiting:
            self._hold(self.tree.head if exchange is None else exchange.parent)

    def _hold(self, head: int | None) -> None:
        """Make the backend's history the branch that ends with `head`."""
        self._held.hold(self.tree.path(head))

    def _refuse_while_busy(self) -> None:
        if self.turn is not None or self.waiting:
            raise EngineError(_BUSY)

    # --- the answer ---

    def tick(self, now: float) -> bool:
        """Move what moves by itself; whether anything did."""
        figures = self._backend.figures() if self._running else None
        moved = [turn.tick(now, figures) for turn in self._running.values()]
        return any(moved)

    def begun(self, before: Outcome, index: int = 0) -> None:
        """A running answer has begun, or goes on: save what it goes on from."""
        turn = self._running.get(index)
        if turn is not None:
            turn.begin(before)
            self.keeper.save(turn.session, turn.exchange)

    def take(self, tokens: Sequence[worker.Token]) -> None:
        """Show and save the next tokens of the running answers."""
        for index in dict.fromkeys(token.index for token in tokens):
            if (turn := self._running.get(index)) is None:
                continue
            events = turn.take([token for token in tokens if token.index == index])
            latest = turn.before if turn.is_candidate else self._backend.last
            if latest is not None:
                turn.note(latest)
            self.keeper.say(turn.session, turn.exchange, events)

    def stop(self) -> None:
        if self._running:
            for turn in self._running.values():
                turn.is_stopping = True
            self._worker.stop()

    def answered(self, outcome: Outcome | None, now: float, index: int = 0, problem: str = "") -> None:
        """A running answer is over; `problem` is the error that ended it, if one did."""
        turn = self._running.pop(index, None)
        if turn is None:
            return
        if self.turn is turn:
            self.turn = next(iter(self._running.values()), None)
        turn.problem = problem
        turn.end(outcome, now)
        if turn.is_dropped:
            self.keeper.save(turn.session, turn.exchange)
            return
        if not turn.has_begun and (turn.is_candidate or (turn.is_retry and turn.is_stopping)):
            self._withdraw(turn)
        else:
            self._note(turn)
        if turn.is_undone:
            self.undo()
        elif turn.is_candidate and not self._running and not self.choice:
            self._hold(self.tree.head)

    def _note(self, turn: Turn) -> None:
        """Save an answer that is over, and count its figures in."""
        if not turn.is_candidate:
            self._held.note(self.path)
        self.keeper.save(turn.session, turn.exchange)
        self.ended = turn
        if turn.stats is not None:
            self.stats.add(turn.stats, retry=turn.is_retry)
            self.process.add(turn.stats, retry=turn.is_retry)

    def failed(self, now: float, problem: str = "") -> None:
        """What runs ended with an error. What was said is kept; a message that was refused is given back."""
        turns, self._running, self.turn = list(self._running.values()), {}, None
        for turn in turns:
            turn.problem = problem
            self._fail(turn, now)

    def _fail(self, turn: Turn, now: float) -> None:
        if turn.has_begun or turn.is_resumed:
            self._held.forget()  # who knows how much of it the history holds
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
        """Nothing was said: the exchange was never there. Of candidates the others are still to be chosen from."""
        was_head = turn.exchange.id == self.tree.head
        self.tree.drop(turn.exchange.id)
        self._shown.drop(turn.exchange)
        self.keeper.drop(turn.session, turn.exchange.id)
        self.choice = [other for other in self.choice if other is not turn]
        if self.choice:
            self._select(self.choice[0].exchange.id)
            self.show()
        elif was_head:
            self._held.forget()
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
        chosen, of_message = self._beside(exchange, side, isinstance(entry, UserEntry))
        self._go(self.tree.leaf(chosen))
        return self.entries_of(self.tree[chosen])[0 if of_message else 1]

    def _beside(self, exchange: Exchange, side: int, of_message: bool) -> tuple[int, bool]:
        """The alternative on that side, and whether it is one of the message."""
        answers, messages = self.tree.answers(exchange), self.tree.messages(exchange)
        if len(answers) > 1 and not (of_message and len(messages) > 1):
            return answers[min(max(answers.index(exchange) + side, 0), len(answers) - 1)].id, False
        message = messages[min(max(messages.index(exchange.user) + side, 0), len(messages) - 1)]
        same = [other.id for other in self.tree.siblings(exchange.id) if other.user == message]
        return self._seen.get((exchange.parent, message), same[-1]), True

    def _step_ahead(self) -> Entry | None:
        """Go to the end of what was taken back."""
        undone = self.undone
        if not undone:
            return None
        self._go(undone[-1].id)
        return self.entries_of(undone[0])[0]

    def _go(self, head: int | None) -> None:
        self._select(head)
        self._hold(head)
        self.show()

    def _select(self, head: int | None) -> None:
        self.tree.select(head)
        self._looked()
        self.keeper.head(head)

    def _looked(self) -> None:
        for exchange in self.path:
            self._seen[exchange.parent, exchange.user] = exchange.id

    # --- what the model sees ---

    def try_compaction(self, exchange: Exchange, compaction: Compaction | None) -> None:
        """Make the history what it would be with this: it is warmed while the person reads."""
        if self.turn is None and not self.waiting:
            tried = [replace(e, compaction=compaction) if e is exchange else e for e in self.path]
            self._held.hold(tried)

    def compact(self, compactions: Sequence[tuple[Exchange, Compaction | None]]) -> None:
        """From now on the model sees what is before and with each of these exchanges like this."""
        self._refuse_while_busy()
        for exchange, compaction in compactions:
            exchange.compaction = compaction
        self._seen_anew([exchange for exchange, _ in compactions])

    def pin(self, exchange: Exchange) -> bool:
        """Pin a message with its answer, or unpin it; whether it is pinned now."""
        self._refuse_while_busy()
        exchange.is_pinned = not exchange.is_pinned
        self._seen_anew([exchange])
        return exchange.is_pinned

    def _seen_anew(self, changed: Sequence[Exchange]) -> None:
        for exchange in changed:
            self.keeper.save(self.keeper.session, exchange)
        self._hold(self.tree.head)
        self.show()

    # --- sessions ---

    def clear(self) -> None:
        """A new conversation; what runs is stopped and kept where it was."""
        self._drop()
        while self.waiting:
            self.take_back()
        self.keeper.leave()
        self._begin_with(Tree(), "")
        self._held.note([])
        self._worker.submit(worker.Reset())

    def _drop(self) -> None:
        """What runs is stopped and kept where it was."""
        self.stop()
        self.choice = []
        for turn in self._running.values():
            turn.is_dropped = True

    def open(self, session: str | None, tree: Tree, title: str = "") -> None:
        """Go on with a session that was saved."""
        self._drop()
        while self.waiting:
            self.take_back()
        self.keeper.session = session
        self._begin_with(tree, title)
        self._held.forget()
        self._hold(tree.head)

    def hold_again(self) -> None:
        """Another model answers from now on: give it the history, unless a message has done so already."""
        if self.turn is None and not self._held.is_known:
            self._hold(self.tree.head)

    def forget(self) -> None:
        """The backend may hold anything."""
        self._held.forget()

    def _begin_with(self, tree: Tree, title: str) -> None:
        self.tree, self.given_title = tree, title
        self._shown, self._seen = Shown(tree), {}
        self.ended = None
        self.stats = SessionStats.of(exchange.stats for exchange in tree.exchanges)
        self._looked()
        self.show()

    # --- what is shown ---

    def show(self) -> None:
        """Bring the screen up to the selected branch."""
        entries: list[Entry] = []
        path = self.path
        compacted = summarised(path)
        for number, exchange in enumerate(path, 1):
            entries += self.entries_of(exchange)
            self._shown.mark(exchange)
            if number == compacted:
                entries.append(self._shown.compaction_of(path[:number]))
        if self.choice:  # they are shown elsewhere
            entries.remove(self.entries_of(path[-1])[1])
        self._view.show_path([*entries, *self.waiting])
