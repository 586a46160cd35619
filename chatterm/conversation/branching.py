"""The tree of a conversation and its branches: one is selected, shown, and held by the backend as its history."""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from chatterm.backends.backend import Backend, Compaction, Exchange, TurnStats
from chatterm.backends.worker import Worker
from chatterm.conversation.conversation import Conversation
from chatterm.conversation.entries import AnswerEntry, Entry, RetryEntry, UserEntry
from chatterm.conversation.entry_cache import EntryCache, labels
from chatterm.conversation.figures import SessionStats
from chatterm.conversation.session_tree import SessionTree
from chatterm.conversation.tool_entry import ToolsEntry
from chatterm.conversation.turn import RunningTurn, exchange_stats
from chatterm.conversation.view import View
from chatterm.sessions.titles import make_title
from chatterm.sessions.tree import Tree


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parts of a session that are prepared before it is opened."""

    shown: EntryCache
    entries: Sequence[Entry]
    """The entries of the selected branch."""
    stats: SessionStats


class Branching(Conversation[RunningTurn]):
    """A conversation whose selected branch is shown."""

    def __init__(self, backend: Backend, thread: Worker, saved: SessionTree, view: View) -> None:
        super().__init__(backend, thread.submit, saved)
        self._view = view
        self.choice: list[RunningTurn] = []
        """Candidates for the user to choose from; some may still run. [] if there is no choice to make."""
        self.waiting: deque[UserEntry] = deque()
        self.acting: ToolsEntry | None = None
        """The tool calls of the last answer, while they await permission or run."""
        self.ended: RunningTurn | None = None
        """The latest finished turn, for its figures."""
        self.show_thinking: bool | None = None
        self._shown = EntryCache(self.tree)

    # --- state ---

    @property
    def title(self) -> str:
        """The session's title, or one made from its first message; "" before it begins."""
        first = next(iter(self.path), None)
        return self.saved.info.title or (make_title(first.user) if first is not None else "")

    def exchange_of(self, entry: Entry) -> Exchange | None:
        """Return the exchange on the selected branch that an entry belongs to; None if there is none."""
        return self._shown.exchange_of(entry)

    def entries_of(self, exchange: Exchange) -> tuple[UserEntry, AnswerEntry]:
        """Return the entries that show an exchange: its message and its answer."""
        return self._shown.entries_of(exchange, show_thinking=self.show_thinking)

    @property
    def last_answer(self) -> Exchange | None:
        """The last answer of the selected branch if the loaded model gave it; otherwise None."""
        head = self.tree.head
        return self.tree[head] if head is not None and self.tree[head].model in self._present else None

    @property
    def _present(self) -> tuple[str, str]:
        """The names of the model that is or will be loaded."""
        info = self._backend.info
        return self._backend.model, info.name if info is not None else ""

    @property
    def is_remote(self) -> bool:
        """Whether the model that is loaded runs on a server."""
        info = self._backend.info
        return info is not None and info.is_remote

    @property
    def _resumes(self) -> Container[str]:
        """What the last answer may end in for /continue to be able to resume it, as in ModelInfo."""
        info = self._backend.info
        return info.resumes if info is not None else ("nothing", "thinking", "text")

    @property
    def ended_here(self) -> RunningTurn | None:
        """The latest finished turn if it gave the last answer; otherwise None."""
        return self.ended if self.ended is not None and self.ended.exchange is self.last_answer else None

    @property
    def saved_stats(self) -> TurnStats | None:
        """The figures saved with the last answer; None if there are none."""
        return exchange_stats(self.last_answer) if self.last_answer is not None else None

    @property
    def is_answering(self) -> bool:
        """Whether an answer runs, or tool calls await permission or run."""
        return self.turn is not None or self.acting is not None

    @property
    def is_busy(self) -> bool:
        """Whether an answer runs, tool calls await permission or run, or a message waits."""
        return self.is_answering or bool(self.waiting)

    # --- branches ---

    @property
    def undone(self) -> list[Exchange]:
        """Exchanges that were undone and can be redone, next first."""
        return self.tree.ahead(self.tree.head)

    def take_back(self) -> None:
        """Drop the latest entry of the queue; the text of a message goes back into the composer."""
        entry = self.waiting.pop()
        self.show()
        if not isinstance(entry, RetryEntry):
            self._view.give_back(entry.text)

    def take_all_back(self) -> None:
        while self.waiting:
            self.take_back()

    def step(self, entry: Entry | None, side: int) -> Entry | None:
        """Go to the alternative before (-1) or after (1) an entry; None means the last exchange that has alternatives.

        Return the entry that is now in its place; None if there is no other branch.
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
        """Return the id of the alternative on that side, and whether its message is another one."""
        answers, messages = self.tree.answers(exchange), self.tree.messages(exchange)
        if len(answers) > 1 and not (of_message and len(messages) > 1):
            return answers[min(max(answers.index(exchange) + side, 0), len(answers) - 1)].id, False
        message = messages[min(max(messages.index(exchange.user) + side, 0), len(messages) - 1)]
        same = [other.id for other in self.tree.siblings(exchange.id) if other.user == message]
        return self._shown.seen.get((exchange.parent, message), same[-1]), True

    def _step_ahead(self) -> Entry | None:
        """Redo everything that was undone; return the first entry of it, or None if there is nothing."""
        if not (undone := self.undone):
            return None
        self._go(undone[-1].id)
        return self.entries_of(undone[0])[0]

    # --- what the model sees ---

    def try_compaction(self, exchange: Exchange, compaction: Compaction | None) -> None:
        """Make the history what it would be with this compaction, so that it is warmed while the user reads."""
        if self.turn is None and not self.waiting:
            tried = [replace(e, compaction=compaction) if e is exchange else e for e in self.path]
            self._hold(tried)

    # --- what is shown ---

    def prepared(self, tree: Tree) -> Prepared:
        """Prepare what opening a session needs. This takes a while; a thread of its own may do it."""
        shown, path = EntryCache(tree), tree.path(tree.head)
        shown.turn_to(path)
        shown.named = self._names(shown.models)
        stats = SessionStats.of(exchange.stats for exchange in tree.exchanges)
        return Prepared(shown, self._standing(shown, path, 0), stats)

    def show(self, changed: Sequence[Exchange] = (), made: Sequence[Entry] = ()) -> None:
        """Show the selected branch. Entries already shown stay, up to the first of the `changed` exchanges.

        `made` holds all of its entries if they were prepared and nothing is shown yet.
        """
        path = self.path
        first = self._shown.turn_to(path, changed)
        if self._shown.named != (named := self._names(self._shown.models)):
            self._shown.named = named
            self._view.change(self._shown.name(path[: self._shown.looks_alike]))
        entries = self._standing(self._shown, path, first, {exchange.id for exchange in changed})
        above = self._last_entry(path[:first]) if first and not made else None
        if first and made:
            entries = [*made[: made.index(entries[0])], *entries]
        if self.choice:  # candidates are shown elsewhere
            entries.remove(self.entries_of(path[-1])[1])
        acting = [self.acting] if self.acting is not None else []
        self._view.show_path([*entries, *acting, *self.waiting], above)

    def show_pinned(self, exchange: Exchange) -> None:
        """Show whether an exchange is pinned, and in the summary that stands for it how many are."""
        path, shown = self.path, self._shown
        shown.mark(
            exchange, shown.named.get(exchange.model, ""), self._resumes if exchange is path[-1] else ()
        )
        self.show([path[shown.compacted - 1]] if shown.compacted else [])

    def _names(self, models: Sequence[str]) -> dict[str, str]:
        """Return what answers call these models; {} if the loaded model gave every answer."""
        names = labels(models)
        return names if len(names) > 1 or any(name not in self._present for name in names) else {}

    def _standing(
        self, shown: EntryCache, path: Sequence[Exchange], first: int, changed: Container[int] = ()
    ) -> list[Entry]:
        """Return the entries of a branch, leaving out its `first` exchanges; `changed` are ids of exchanges."""
        entries: list[Entry] = []
        for number, exchange in enumerate(path[first:], first + 1):
            entries += shown.entries_of(exchange, show_thinking=self.show_thinking)
            if number > shown.looks_alike or exchange.id in changed:
                resumes = self._resumes if number == len(path) else ()
                shown.mark(exchange, shown.named.get(exchange.model, ""), resumes)
            if number == shown.compacted:
                entries.append(shown.compaction_of(path[:number]))
        return entries

    def _last_entry(self, path: Sequence[Exchange]) -> Entry:
        """Return the last entry of these exchanges: an answer, or the summary below it."""
        compacted = len(path) == self._shown.compacted
        return self._shown.compaction_of(path) if compacted else self.entries_of(path[-1])[1]
