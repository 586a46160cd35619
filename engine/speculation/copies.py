"""Tracks the place in its text that an answer repeats with changes.

before | def  one ( state ) : state . get     a changed token stands for the one in its place;
now    | def  one ( known ) : known . get     if tokens are left out, the place moves past them

Here the second "state" is expected to have become "known", like the first.
"""

from array import array
from dataclasses import dataclass, field

SPAN = 32
"""For this many of the latest tokens it is recorded whether they were as expected."""
RECENT = 8
"""The number of latest tokens to which MOSTLY and SOME apply."""
MOSTLY, SOME = 6, 4
"""How many of those must be as expected for the place to predict what comes next, and for it to be followed."""
AHEAD = 2
"""The most tokens that may have been left out at once."""
_SPAN, _RECENT = (1 << SPAN) - 1, (1 << RECENT) - 1


@dataclass(slots=True)
class Copy:
    """The place that an answer follows, if any."""

    place: int = -1
    """Position of the token that the newest one stands for; -1: no place is followed."""
    changes: dict[int, int] = field(default_factory=dict)
    """What stood, last time, for each token that was changed."""
    _same: int = 0
    """One bit for each of the latest tokens, the newest lowest: whether it was as expected."""
    _known: int = 0
    """Tokens of the text processed so far."""

    @property
    def length(self) -> int:
        """How many of the latest SPAN tokens were as expected."""
        return self._same.bit_count()

    @property
    def recent(self) -> int:
        """How many of the latest RECENT tokens were as expected."""
        return (self._same & _RECENT).bit_count()

    def begin(self, place: int, length: int, known: int) -> None:
        """Follow `place` from now on: the last `length` tokens up to it match, in a text of `known` tokens."""
        self.place, self._same, self._known = place, (1 << min(length, SPAN)) - 1, known
        self.changes = {}

    def coming(self, tokens: "array[int]", most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that are expected next."""
        coming = tokens[self.place + 1 : self.place + 1 + most]
        return tuple(self.changes.get(token, token) for token in coming)

    def follow(self, tokens: "array[int]") -> None:
        """Advance the place over the tokens that were added to the text."""
        for at in range(self._known, len(tokens) if self.place >= 0 else 0):
            expected, token = self.place + 1, tokens[at]
            before = tokens[expected]
            right = self.changes.get(before, before) == token
            if right:
                self.place = expected
            else:
                near = range(expected, min(expected + AHEAD + 1, at))
                self.place = next((place for place in near if tokens[place] == token), expected)
                self.changes.pop(before, None)
                if self.place == expected and before != token:
                    self.changes[before] = token
            self._same = (self._same << 1 | right) & _SPAN
            if self.recent < SOME:
                self.place = -1
                break
        self._known = len(tokens)
