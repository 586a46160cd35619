"""A Markdown document that grows while it is shown.

Blocks that can no longer change are laid out once and kept; only what comes after them is laid out again. An
end that never closes (one endless paragraph, a code block of a thousand lines) is cut, so that the cost of
showing a few more characters does not grow with the length of the answer.
"""

import re
from dataclasses import dataclass

from markdown_it.token import Token

from chatterm.markdown.blocks import can_lay_out, parser, token_lines
from chatterm.markdown.lines import FixedLine
from chatterm.markdown.literal import is_definition
from chatterm.markdown.tint import Marks, mark, within

_LONGEST_TAIL = 2048
"""Most characters that are laid out again with every addition."""
_PIECE = 4096
"""Most characters that are parsed at once; longer blocks are parsed in parts."""
_ITEM = re.compile(r"^(?:[-*+]|\d{1,9}[.)])\s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Part:
    source: str
    continued: bool
    """Whether it continues the part before: no empty line between them."""
    guessed: Marks = ()
    """The ranges of `source` that were guessed."""

    def more(self, text: str, guessed: bool) -> "_Part":
        start, marks = len(self.source), self.guessed
        if guessed and text:
            before = marks[-1] if marks and marks[-1][1] == start else (start, start)
            marks = (*(marks[:-1] if before[1] > before[0] else marks), (before[0], start + len(text)))
        return _Part(self.source + text, self.continued, marks)

    def divided(
        self, cut: int, closing: str = "", opening: str = "", continued: bool = False
    ) -> "tuple[_Part, _Part]":
        """Split at `cut`; return the text before it followed by `closing`, and `opening` followed by the rest."""
        head, rest = self.source[:cut], self.source[cut:]
        shift = len(opening)
        marks = tuple((first + shift, last + shift) for first, last in within(self.guessed, cut, rest))
        before = _Part(head + closing, self.continued, within(self.guessed, 0, head))
        return before, _Part(opening + rest, continued, marks)


class Document:
    """A growing document: append text, read lines."""

    def __init__(self, source: str = "") -> None:
        self._parts: list[_Part] = []
        self._tail = _Part("", continued=False)
        self._width = 0
        self._lines: list[FixedLine] = []
        self._fixed = 0
        """The number of parts whose lines are in `_lines`, as the first `_fixed_lines` of it."""
        self._fixed_lines = 0
        self._stale = False
        if source:
            self.append(source)

    @property
    def is_empty(self) -> bool:
        return not self._parts and not self._tail.source.strip()

    def append(self, text: str, *, guessed: bool = False) -> None:
        self._tail = self._tail.more(text, guessed)
        self._stale = True

    def lines(self, width: int) -> list[FixedLine]:
        """Return every line at this width. The list is the document's own: read it, do not keep it."""
        while not self.step(width, waits=True):
            pass
        return self._lines

    def step(self, width: int, *, waits: bool = False) -> bool:
        """Lay out a piece of what is not laid out at this width. Return whether it was the last one.

        Unless it `waits`, it lays out nothing while a language of the piece is being prepared for highlighting. A list
        that `lines` returned earlier is not changed when the width changes.
        """
        if width != self._width:
            self._width, self._fixed, self._fixed_lines, self._lines = width, 0, 0, []
            self._stale = True
        if not self._stale:
            return True
        if self._fixed == len(self._parts):
            tail = self._freeze()
            if tail is not None:
                if not (waits or can_lay_out(tail)):
                    return False
                del self._lines[self._fixed_lines :]
                self._add(self._tail, tail)
                self._stale = False
                return True
        if self._fixed < len(self._parts):
            part = self._parts[self._fixed]
            tokens = parser().parse(part.source)
            if not (waits or can_lay_out(tokens)):
                return False
            del self._lines[self._fixed_lines :]
            self._add(part, tokens)
            self._fixed, self._fixed_lines = self._fixed + 1, len(self._lines)
        return False

    def _add(self, part: _Part, tokens: list[Token]) -> None:
        if part.guessed:
            mark(tokens, part.source, part.guessed)
        lines = token_lines(tokens, self._width, continued=part.continued)
        if self._lines and lines and not part.continued:
            self._lines.append(())
        self._lines += map(tuple, lines)

    def _freeze(self) -> list[Token] | None:
        """Move a piece that can no longer change from the tail to the parts, and return None. Usually there is no such
        piece: then return the parsed tail, which the caller need not parse again.
        """
        tail = self._tail
        source = tail.source[:_PIECE]
        tokens = parser().parse(source)
        cut = _closed(source, tokens)
        if cut:
            head, self._tail = tail.divided(cut)
        elif len(tail.source) > _LONGEST_TAIL:
            head, self._tail = tail.divided(*_middle(source, tokens), continued=True)
        else:
            return tokens
        self._parts.append(head)
        return None


def _closed(source: str, tokens: list[Token]) -> int:
    """Return how many characters of `source` belong to blocks that no appended text can change."""
    tops = [t for t in tokens if t.level == 0 and t.map and t.nesting != -1]
    pairs = zip([None, *tops], tops, strict=False)  # definitions that follow each other stay together
    starts = [
        t.map[0]
        for before, t in pairs
        if t.map and not (before and is_definition(before) and is_definition(t))
    ]
    whole_lines = source.count("\n")
    # A block is closed once the first line of the next one is complete: "1" may still become "1. item".
    while starts and starts[-1] >= whole_lines:
        starts.pop()
    if not starts or starts[-1] == 0:
        return 0
    return sum(len(line) + 1 for line in source.split("\n")[: starts[-1]])


def _middle(source: str, tokens: list[Token]) -> tuple[int, str, str]:
    """Return where to cut a long block in two, the text that closes the first half and what opens the second."""
    kind, markup = next(((t.type, t.markup) for t in tokens), ("", ""))
    newline = source.rfind("\n", 0, _LONGEST_TAIL) + 1
    lines = source.split("\n", 2)
    if kind == "fence" and newline > len(lines[0]) + 1:
        return newline, markup, f"{lines[0]}\n"
    if kind == "table_open" and newline > len(lines[0]) + len(lines[1]) + 2:
        return newline, "", f"{lines[0]}\n{lines[1]}\n"
    if kind in ("bullet_list_open", "ordered_list_open"):
        items = [match.start() for match in _ITEM.finditer(source, 1, _LONGEST_TAIL)]
        if items:
            return items[-1], "", ""
    space = max(newline, source.rfind(" ", 0, _LONGEST_TAIL) + 1) or _LONGEST_TAIL
    return space, "", ""
