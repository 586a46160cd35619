"""The texts in which guesses are looked up: one for each conversation, branches included, kept for its next turn."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.speculation.copies import MOSTLY, RECENT, Copy
from engine.speculation.sources import NOTHING, Guess
from engine.speculation.suffixes import LONGEST, SuffixIndex

MOST_TOKENS = 1 << 18
"""Of a text; beyond them only what its conversation says now is kept."""
KEPT = 8
"""Texts of conversations that are not answered now."""
ELSEWHERE = 1 << 17
"""Tokens from elsewhere: of earlier sessions, and of branches that were not said in this run."""
SURE = 8
"""A match in the conversation's own text that is as long is taken before others are looked at, and followed,"""
SURER = 16
"""and one that is as long before a place with changes that is."""


@dataclass(slots=True, eq=False)
class Text:
    """What was said in a conversation, on all its branches one after the other."""

    client: Hashable
    path: "array[int]" = field(default_factory=lambda: array("i"))
    """The branch that was said last: its tokens from the first one on."""
    index: SuffixIndex = field(default_factory=SuffixIndex)
    copy: Copy = field(default_factory=Copy)
    """The place in `index` that is followed."""

    def go_on(self, tokens: Sequence[int]) -> None:
        """The branch has these tokens now, beside those that it has."""
        self.path.extend(tokens)
        self.index.extend(tokens)
        if len(self.index) > MOST_TOKENS:
            self.index, self.copy = SuffixIndex(), Copy()
            self.index.extend(self.path[-MOST_TOKENS // 2 :])

    def with_changes(self, tail: "array[int]", best: Guess, most: int) -> Guess:
        """What follows in the place that the text follows with changes, where that says more than `best`, which follows
        the longest match; else that."""
        copy, tokens = self.copy, self.index.tokens
        is_surer = copy.recent < RECENT and best.length >= max(SURER, copy.length + 1)
        if best.length >= SURE and (copy.place < 0 or is_surer):
            length, places = self.index.places(tail)
            if places and length >= SURE:
                copy.begin(places[-1] - 1, length, len(tokens))
            return best
        if copy.place < 0 or copy.recent < MOSTLY or copy.length <= best.length or most < 1:
            return best
        found = tuple(tokens[copy.place + 1 : copy.place + 1 + most])
        return Guess(found, copy.length, not best.tokens or best.tokens[0] == found[0])

    def turn_to(self, tokens: "array[int]", common: int) -> None:
        """Another branch is said, whose first `common` tokens are those of the one before."""
        del self.path[common:]
        self.copy = Copy()
        self.go_on(tokens[common:])


@dataclass(slots=True)
class Texts:
    """Whoever is answered has a text for himself; those of a client's other conversations are looked at, too."""

    idle: list[Text] = field(default_factory=list)
    """The latest comes last."""
    elsewhere: SuffixIndex = field(default_factory=SuffixIndex)
    """What was said elsewhere, to the person who is no server's client."""

    def take(self, client: Hashable, tokens: Sequence[int]) -> Text:
        """The text of the conversation that goes on with these tokens, which it then ends with."""
        said = array("i", tokens)
        own = [(_common(text.path, said), text) for text in self.idle if text.client == client]
        common, text = max(own, key=lambda pair: pair[0], default=(0, Text(client)))
        if 2 * common < min(len(text.path), len(said)) or common == 0:
            common, text = 0, Text(client)
        else:
            self.idle.remove(text)
        text.turn_to(said, common)
        return text

    def give_back(self, text: Text) -> None:
        """Its conversation waits for its next message."""
        self.idle.append(text)
        del self.idle[:-KEPT]

    def know(self, elsewhere: SuffixIndex) -> None:
        """Look at this from now on instead of what was known of elsewhere before."""
        self.elsewhere = elsewhere

    def guess(self, text: Text, most: int) -> Guess:
        """Up to `most` tokens that may follow in `text`."""
        text.copy.follow(text.index.tokens)
        tail = text.path[-LONGEST:]
        best = self._longest(text, tail, most)
        return text.with_changes(tail, best, most)

    def _longest(self, text: Text, tail: "array[int]", most: int) -> Guess:
        """What follows the longest match."""
        best = text.index.guess(tail, most)
        if best.length >= SURE:
            return best
        indexes = [one.index for one in self.idle if one.client == text.client]
        if text.client is None:
            indexes.append(self.elsewhere)
        others = [index.guess(tail, most) for index in indexes]
        return max(best, *others, NOTHING, key=lambda guess: guess.length)


def from_elsewhere(texts: Iterable[Sequence[int]]) -> SuffixIndex:
    """An index of these texts, the latest of which comes first: of as many as are not too long together."""
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
    """How many tokens two texts begin with alike."""
    count = min(len(one), len(other))
    if count == 0:
        return 0
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    return int(differ.argmax()) if differ.any() else count
