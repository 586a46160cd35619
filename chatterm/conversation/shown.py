"""How the exchanges of a session are shown: a message and an answer each, which know which alternative they are."""

from collections.abc import Sequence

from chatterm.backends.backend import Exchange
from chatterm.conversation.entries import AnswerEntry, Branch, CompactionEntry, Entry, UserEntry
from chatterm.conversation.turn import answer_of
from chatterm.sessions.tree import Tree


class Shown:
    """The entries of one tree, made when they are first asked for. Answers to the same message share that entry."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._pairs: dict[int, tuple[UserEntry, AnswerEntry]] = {}
        self._compactions: dict[int, CompactionEntry] = {}

    def exchange_of(self, entry: Entry) -> Exchange | None:
        """The exchange on the selected branch that an entry belongs to."""
        path = self._tree.path(self._tree.head)
        return next((e for e in reversed(path) if entry in self._pairs.get(e.id, ())), None)

    def entries_of(self, exchange: Exchange, *, show_thinking: bool | None) -> tuple[UserEntry, AnswerEntry]:
        """How an exchange is shown; where it has not been yet, its thinking open, closed or open while it runs."""
        pair = self._pairs.get(exchange.id)
        if pair is None:
            answers = (self._pairs.get(e.id) for e in self._tree.answers(exchange))
            shared = next((known[0] for known in answers if known), None)
            answer = answer_of(exchange, show_thinking=show_thinking)
            pair = self._pairs[exchange.id] = (shared or UserEntry(exchange.user), answer)
        return pair

    def put(self, exchange: Exchange, prompt: UserEntry, answer: AnswerEntry) -> None:
        """From now on these show the exchange."""
        self._pairs[exchange.id] = (prompt, answer)

    def drop(self, exchange: Exchange) -> None:
        self._pairs.pop(exchange.id, None)

    def compaction_of(self, path: Sequence[Exchange]) -> CompactionEntry:
        """What stands behind the last of these exchanges, for which a summary stands."""
        compaction = path[-1].compaction
        assert compaction is not None
        fresh = CompactionEntry(compaction.summary or "", len(path), sum(e.is_pinned for e in path))
        known = self._compactions.get(path[-1].id)
        if known is None or known.shown != fresh.shown:
            known = self._compactions[path[-1].id] = fresh
        return known

    def mark(self, exchange: Exchange) -> None:
        """The entries of an exchange say which of how many alternatives they are."""
        prompt, answer = self._pairs[exchange.id]
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


def _set_branch(entry: UserEntry | AnswerEntry, branch: Branch) -> None:
    if entry.branch != branch:
        entry.branch = branch
        entry.changed()
