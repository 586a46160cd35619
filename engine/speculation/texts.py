"""The texts in which guesses are looked up: one per conversation, branches included, kept for its next turn."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.speculation.copies import MOSTLY, RECENT, Copy
from engine.speculation.sources import NOTHING, Guess
from engine.speculation.suffixes import LONGEST, SuffixIndex

MOST_TOKENS = 1 << 18
"""The most tokens of a text; beyond them only the end of its current branch is kept."""
KEPT = 8
"""The most texts that are kept of conversations that are not being answered."""
ELSEWHERE = 1 << 17
"""The most tokens from elsewhere: from earlier sessions, and from branches not used in this run."""
SURE = 8
"""A match of this length in the conversation's own text is taken without looking at other texts, and is followed."""
SURER = 16
"""A match of this length replaces a place that is followed with changes."""


@dataclass(slots=True, eq=False)
class ConversationText:
    """The tokens of a conversation, with all its branches one after the other."""

    client: Hashable
    path: "array[int]" = field(default_factory=lambda: array("i"))
    """All tokens of the latest branch."""
    index: SuffixIndex = field(default_factory=SuffixIndex)
    copy: Copy = field(default_factory=Copy)
    """The place in `index` that is followed."""

    def go_on(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the branch."""
        self.path.extend(tokens)
        self.index.extend(tokens)
        if len(self.index) > MOST_TOKENS:
            self.index, self.copy = SuffixIndex(), Copy()
            self.index.extend(self.path[-MOST_TOKENS // 2 :])

    def with_changes(self, tail: "array[int]", best: Guess, most: int) -> Guess:
        """Return what comes after the place that the text follows with changes, if that is a better guess than `best`,
        the one after the longest match; otherwise `best`."""
        copy, tokens = self.copy, self.index.tokens
        is_surer = copy.recent < RECENT and best.length >= max(SURER, copy.length + 1)
        if best.length >= SURE and (copy.place < 0 or is_surer):
            length, places = self.index.places(tail)
            if places and length >= SURE:
                copy.begin(places[-1] - 1, length, len(tokens))
            return best
        if copy.place < 0 or copy.recent < MOSTLY or most < 1:
            return best
        if copy.length < best.length or (copy.length == best.length and not copy.changes):
            return best
        found = copy.coming(tokens, most)
        return Guess(found, copy.length, not best.tokens or best.tokens[0] == found[0])

    def turn_to(self, tokens: "array[int]", common: int) -> None:
        """Switch to another branch, which shares its first `common` tokens with the previous one."""
        del self.path[common:]
        self.copy = Copy()
        self.go_on(tokens[common:])


@dataclass(slots=True)
class Texts:
    """All texts. Each sequence being answered has its own; the client's other conversations are searched, too."""

    idle: list[ConversationText] = field(default_factory=list)
    """The texts of conversations that are not being answered, the latest last."""
    elsewhere: SuffixIndex = field(default_factory=SuffixIndex)
    """Texts from elsewhere, for the local user, who is not a client of a server."""

    def take(self, client: Hashable, tokens: Sequence[int]) -> ConversationText:
        """Take the text of the conversation that these tokens continue, and extend it to end with them."""
        said = array("i", tokens)
        own = [(_common(text.path, said), text) for text in self.idle if text.client == client]
        common, text = max(own, key=lambda pair: pair[0], default=(0, ConversationText(client)))
        if 2 * common < min(len(text.path), len(said)) or common == 0:
            common, text = 0, ConversationText(client)
        else:
            self.idle.remove(text)
        text.turn_to(said, common)
        return text

    def give_back(self, text: ConversationText) -> None:
        """Return a text whose conversation now waits for its next message."""
        self.idle.append(text)
        del self.idle[:-KEPT]

    def know(self, elsewhere: SuffixIndex) -> None:
        """Use this index of texts from elsewhere instead of the earlier one."""
        self.elsewhere = elsewhere

    def guess(self, text: ConversationText, most: int) -> Guess:
        """Guess up to `most` tokens that follow `text`."""
        text.copy.follow(text.index.tokens)
        tail = text.path[-LONGEST:]
        best = self._longest(text, tail, most)
        return text.with_changes(tail, best, most)

    def _longest(self, text: ConversationText, tail: "array[int]", most: int) -> Guess:
        """Return what follows the longest match."""
        best = text.index.guess(tail, most)
        if best.length >= SURE:
            return best
        indexes = [one.index for one in self.idle if one.client == text.client]
        if text.client is None:
            indexes.append(self.elsewhere)
        others = [index.guess(tail, most) for index in indexes]
        return max(best, *others, NOTHING, key=lambda guess: guess.length)


def from_elsewhere(texts: Iterable[Sequence[int]]) -> SuffixIndex:
    """Return an index of `texts`, which come latest first: of as many as fit in ELSEWHERE tokens together."""
    taken, tokens = list[Sequence[int]](), 0
    for text in texts:
        if tokens + len(text) > ELSEWHERE:
            break
        taken.append(text)
        tokens += len(text)
    index, whole = SuffixIndex(), array("i")
    for text in reversed(taken):
        whole.extend(text)
    index.extend(whole)
    return index


def _common(one: "array[int]", other: "array[int]") -> int:
    """Return how many first tokens two texts have in common."""
    count = min(len(one), len(other))
    if count == 0:
        return 0
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    return int(differ.argmax()) if differ.any() else count
