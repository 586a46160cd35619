"""Tracks the place in its text that an answer repeats with changes.

before | def  one ( state ) : state . get     a changed token stands for the one in its place;
now    | def  one ( known ) : known . get     if tokens are left out, the place moves past them
"""

from array import array
from dataclasses import dataclass

SPAN = 32
"""For this many of the latest tokens it is recorded whether they are the same as before."""
RECENT = 8
"""The number of latest tokens to which MOSTLY and SOME apply."""
MOSTLY, SOME = 6, 4
"""How many of those must be the same for the place to predict what comes next, and for it to be followed."""
AHEAD = 2
"""The most tokens that may have been left out at once."""
_SPAN, _RECENT = (1 << SPAN) - 1, (1 << RECENT) - 1


@dataclass(slots=True)
class Copy:
    """The place that an answer follows, if any."""

    place: int = -1
    """Position of the token that the newest one stands for; -1: no place is followed."""
    _same: int = 0
    """One bit for each of the latest tokens, the newest lowest: whether it is the same as before."""
    _known: int = 0
    """Tokens of the text processed so far."""

    @property
    def length(self) -> int:
        """How many of the latest SPAN tokens are the same as before."""
        return self._same.bit_count()

    @property
    def recent(self) -> int:
        """How many of the latest RECENT tokens are the same as before."""
        return (self._same & _RECENT).bit_count()

    def begin(self, place: int, length: int, known: int) -> None:
        """Follow `place` from now on: the last `length` tokens up to it match, in a text of `known` tokens."""
        self.place, self._same, self._known = place, (1 << min(length, SPAN)) - 1, known

    def follow(self, tokens: "array[int]") -> None:
        """Advance the place over the tokens that were added to the text."""
        for at in range(self._known, len(tokens) if self.place >= 0 else 0):
            expected = self.place + 1
            near = (
                place
                for place in range(expected, min(expected + AHEAD + 1, at))
                if tokens[place] == tokens[at]
            )
            self.place = next(near, expected)
            self._same = (self._same << 1 | (tokens[expected] == tokens[at])) & _SPAN
            if self.recent < SOME:
                self.place = -1
                break
        self._known = len(tokens)
