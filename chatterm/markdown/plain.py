"""Plain text as lines: nothing in it is markup."""

from collections.abc import Iterator
from itertools import islice

from chatterm.markdown.lines import FixedLine, wrapped

_PIECE = 200
"""Lines that are laid out at once."""


class PlainText:
    """A text whose lines are laid out a piece at a time, so that a long text does not block the screen."""

    def __init__(self, text: str, style: str) -> None:
        self.text = text
        self._style = style
        self._width = 0
        self._lines: list[FixedLine] = []
        self._rest: Iterator[FixedLine] | None = None
        """The lines that are not laid out yet."""

    def step(self, width: int) -> bool:
        """Lay out some of the lines of this width. Return whether those were the last ones."""
        if width != self._width:
            self._width, self._lines, self._rest = width, [], self._made(width)
        if self._rest is not None:
            piece = list(islice(self._rest, _PIECE))
            self._lines += piece
            if len(piece) == _PIECE:
                return False
            self._rest = None
        return True

    def lines(self, width: int) -> list[FixedLine]:
        """Return every line of this width. The list belongs to the text: do not change it."""
        while not self.step(width):
            pass
        return self._lines

    def _made(self, width: int) -> Iterator[FixedLine]:
        return (tuple(line) for row in self.text.split("\n") for line in wrapped([(row, self._style)], width))
