"""The entries that show a session's exchanges: a message and an answer each, with the number of the alternative."""

from collections import Counter
from collections.abc import Container, Generator, Iterable, Sequence

from chatterm.backends.backend import Exchange
from chatterm.conversation.entries import AnswerEntry, Branch, CompactionEntry, Entry, UserEntry
from chatterm.conversation.tool_entry import ToolsEntry
from chatterm.conversation.turn import finished_answer_entry
from chatterm.sessions.tree import Tree
from chatterm.terminal.sanitize import one_line


class EntryCache:
    """The entries of one tree, made on demand. Answers to the same message share that message's entry."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._pairs: dict[int, tuple[UserEntry, AnswerEntry]] = {}
        self._compactions: dict[int, CompactionEntry] = {}
        self._path: list[Exchange] = []
        """The branch that was shown last."""
        self._models: list[str] = []
        """The model that gave each answer of that branch."""
        self._counts: Counter[str] = Counter()
        """How many answers each model gave."""
        self._summaries: list[int] = []
        """For each summary in that branch, how many exchanges it replaces; the last summary counts."""
        self.looks_alike = 0
        """How many exchanges at the start of the branch look as they did before, but for those that changed."""
        self.seen: dict[tuple[int | None, str], int] = {}
        """The id of the answer that was shown last, by parent and message."""
        self.named: dict[str, str] = {}
        """Short names of models by their names; {} if answers do not name them."""

    @property
    def models(self) -> list[str]:
        """The models that gave answers of the branch that is shown."""
        return [model for model, count in self._counts.items() if count]

    @property
    def compacted(self) -> int:
        """How many exchanges at the start of the branch the latest summary replaces; 0 without one."""
        return self._summaries[-1] if self._summaries else 0

    def turn_to(self, path: Sequence[Exchange], changed: Sequence[Exchange] = ()) -> int:
        """Show this branch from now on. Return how many exchanges at its start stay as and where they are.

        The time this takes depends only on what is new. `changed` are exchanges that may look different now; the last
        exchange of both branches always may, as it was or is the end of one.
        """
        first = max(shared(self._path, path) - 1, 0)
        self.looks_alike = first
        if changed:
            ids = {exchange.id for exchange in changed}
            first = next((place for place, e in enumerate(path[:first]) if e.id in ids), first)
        before = self.compacted
        self._counts.subtract(self._models[first:])
        self._path[first:], self._models[first:] = path[first:], [e.model for e in path[first:]]
        self._counts.update(self._models[first:])
        self.seen.update(((e.parent, e.user), e.id) for e in path[first:])
        while self.compacted > first:
            self._summaries.pop()
        self._summaries += [
            number
            for number, e in enumerate(path[first:], first + 1)
            if e.compaction is not None and e.compaction.summary is not None
        ]
        if self.compacted != before:  # the old summary goes, the new one comes
            first = min([first, *(number - 1 for number in (before, self.compacted) if number)])
        return first

    def exchange_of(self, entry: Entry) -> Exchange | None:
        """Return the exchange on the selected branch that an entry belongs to; None if there is none."""
        path = self._tree.path(self._tree.head)
        return next((e for e in reversed(path) if entry in self._pairs.get(e.id, ())), None)

    def entries_of(self, exchange: Exchange, *, show_thinking: bool | None) -> tuple[UserEntry, AnswerEntry]:
        """Return the entries of an exchange. New ones show thinking open, closed, or (None) open while it runs."""
        pair = self._pairs.get(exchange.id)
        if pair is None:
            answers = (self._pairs.get(e.id) for e in self._tree.answers(exchange))
            shared = next((known[0] for known in answers if known), None)
            answer = finished_answer_entry(exchange, show_thinking=show_thinking)
            asked = ToolsEntry.of(exchange.results) if exchange.results else UserEntry(exchange.user)
            pair = self._pairs[exchange.id] = (shared or asked, answer)
        return pair

    def put(self, exchange: Exchange, prompt: UserEntry, answer: AnswerEntry) -> None:
        """Show the exchange with these entries from now on."""
        self._pairs[exchange.id] = (prompt, answer)

    def drop(self, exchange: Exchange) -> None:
        self._pairs.pop(exchange.id, None)

    def compaction_of(self, path: Sequence[Exchange]) -> CompactionEntry:
        """Return the entry of the summary that stands for these exchanges, shown after the last of them."""
        compaction = path[-1].compaction
        assert compaction is not None
        fresh = CompactionEntry(compaction.summary or "", len(path), sum(e.is_pinned for e in path))
        known = self._compactions.get(path[-1].id)
        if known is None or known.shown != fresh.shown:
            known = self._compactions[path[-1].id] = fresh
        return known

    def name(self, path: Sequence[Exchange]) -> Generator[None, None, None]:
        """Let these answers say what `named` calls their models, from the last up; yields after each."""
        for exchange in reversed(path):
            pair, model = self._pairs.get(exchange.id), self.named.get(exchange.model, "")
            if pair is not None and pair[1].model != model:
                pair[1].model = model
                pair[1].changed()
            yield

    def mark(self, exchange: Exchange, model: str = "", resumes: Container[str] = ()) -> None:
        """Update the entries of an exchange: their numbers among alternatives, the `model` that is named, and how far
        /continue can resume the answer (`resumes` is as in ModelInfo).
        """
        prompt, answer = self._pairs[exchange.id]
        if (answer.model, answer.resumes) != (model, resumes):
            answer.model, answer.resumes = model, resumes
            answer.changed()
        messages = of_answers = (1, 1)
        if len(self._tree.siblings(exchange.id)) > 1:
            names, answers = self._tree.messages(exchange), self._tree.answers(exchange)
            messages = (names.index(exchange.user) + 1, len(names))
            of_answers = (answers.index(exchange) + 1, len(answers))
        _set_branch(prompt, messages)
        _set_branch(answer, of_answers)
        if prompt.is_pinned != exchange.is_pinned:
            prompt.is_pinned = exchange.is_pinned
            prompt.changed()


def shared(one: Sequence[Exchange], other: Sequence[Exchange]) -> int:
    """Return how many exchanges two branches of a tree share at their start, comparing from the end."""
    count = min(len(one), len(other))
    while count and one[count - 1] is not other[count - 1]:
        count -= 1
    return count


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return short names of models by their names: as short as possible without two being the same."""
    known = list(dict.fromkeys(name for name in names if name))
    short = {name: one_line(name.rsplit("/", 1)[-1], 60) for name in known}
    again = Counter(short.values())
    return {name: label if again[label] < 2 else one_line(name, 200) for name, label in short.items()}


def _set_branch(entry: UserEntry | AnswerEntry, branch: Branch) -> None:
    if entry.branch != branch:
        entry.branch = branch
        entry.changed()
