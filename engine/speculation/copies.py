"""Which place in its text an answer follows that says it again with changes.

before | def  one ( state ) : state . get     a token that was changed stands for the one in its place,
now    | def  one ( known ) : known . get     and where some were left out, the place moves on behind them
"""

from array import array
from dataclasses import dataclass

SPAN = 32
"""Tokens of which it is known whether they are as before."""
RECENT = 8
"""Of the latest so many"""
MOSTLY, SOME = 6, 4
"""so many have to be as before for the place to say what comes next, and so many for it to be followed."""
AHEAD = 2
"""Tokens that may have been left out."""
_SPAN, _RECENT = (1 << SPAN) - 1, (1 << RECENT) - 1


@dataclass(slots=True)
class Copy:
    """A place that is followed, if there is one."""

    place: int = -1
    """Of the token that the newest one stands for; -1: none is followed."""
    _same: int = 0
    """A bit for each of the latest tokens, the newest one lowest: whether it is as before."""
    _known: int = 0
    """Tokens of the text so far."""

    @property
    def length(self) -> int:
        """How many of the latest tokens are as before."""
        return self._same.bit_count()

    @property
    def recent(self) -> int:
        return (self._same & _RECENT).bit_count()

    def begin(self, place: int, length: int, known: int) -> None:
        """Follow this place from now on, where as many tokens up to it are the same, in a text of so many."""
        self.place, self._same, self._known = place, (1 << min(length, SPAN)) - 1, known

    def follow(self, tokens: "array[int]") -> None:
        """The text is so long now."""
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
