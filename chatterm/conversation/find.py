"""Search the visible text of a conversation: where a text stands in the entries as laid out. No widget."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from chatterm.conversation.entries import INDENT, AnswerEntry, Entry, UserEntry
from chatterm.markdown.lines import Line, Run

MOST = 1_000
"""Matches that are counted."""
_BLOCK = 64
"""Rows that are searched at once."""
_PIECE = 1 << 16
"""Characters of a folded message that are searched at once."""
_AFTER = 20
"""A match may end this many characters after its block, for each character of the text searched for."""
_AROUND = frozenset(
    "user-bar quote-bar rule bullet code-label code-copy picture branch edited muted warning fold thinking-head".split()  # noqa: SIM905
)
"""Styles of the decoration around a text, which is not searched."""

T = TypeVar("T")
Walk = Generator[None, None, T]
"""Work that yields after each piece."""
LayOut = Callable[[Entry], bool]
Span = tuple[int, int, int]
"""A row of an entry, and where a part of its line begins and ends, in characters."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """One place where the text was found; it may go on over several lines."""

    entry: Entry
    spans: tuple[Span, ...]


class Finder:
    """Finds a text, whatever its case and wherever its lines were broken.

    An entry is searched a block of rows at a time; a match belongs to the block in which it begins. Methods that go
    through many entries yield after each block. They are given `lay_out`, which lays out a piece of an entry and
    returns whether it was the last one.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._pattern = re.compile(r"\s+".join(map(re.escape, text.split())), re.IGNORECASE)
        self._known: dict[Entry, tuple[object, dict[int, list[Match]]]] = {}
        """For each entry: its layout when it was searched, and the matches by number of the block."""
        self.here: Match | None = None
        """The current match."""

    # --- one entry ---

    def block(self, entry: Entry, number: int) -> list[Match]:
        """Return the matches that begin in a block of an entry as it is laid out now, in order."""
        if number < 0 or not isinstance(entry, UserEntry | AnswerEntry) or not self.text.split():
            return []
        known = self._known.get(entry)
        if known is None or known[0] is not entry.layout:
            known = self._known[entry] = (entry.layout, {})
        if number not in known[1]:
            known[1][number] = self._searched(entry, number * _BLOCK)
        return known[1][number]

    def _searched(self, entry: Entry, first: int) -> list[Match]:
        """Search the block that begins at row `first`. Return the matches that begin in it."""
        text, offsets, end = "", list[int](), 0
        for row in range(first, min(first + 2 * _BLOCK, entry.height)):
            offsets.append(len(text))
            end = len(text) if row < first + _BLOCK else end
            piece, joint = _row_text(entry.line(row))
            text += piece + joint
            if row < first + _BLOCK:
                end = len(text)
            elif len(text) - end > _AFTER * len(self.text) + _AFTER:
                break
        found = (m for m in self._pattern.finditer(text) if m.start() < end)
        return [Match(entry, _spans(offsets, first, m.start(), m.end())) for m in found]

    def marked(self, entry: Entry, row: int, line: Line) -> Line:
        """Return a line of an entry with its matches marked."""
        number = row // _BLOCK
        for match in [*self.block(entry, number - 1)[-1:], *self._touching(entry, row)]:
            for at, start, end in match.spans:
                if at == row:
                    here = (
                        self.here is not None and self.here.spans == match.spans and self.here.entry is entry
                    )
                    line = _restyled(line, start, end, "found found-here" if here else "found")
        return line

    def _touching(self, entry: Entry, row: int) -> list[Match]:
        """Return the matches that begin in the block of this row and have a part of the row."""
        found = self.block(entry, row // _BLOCK)
        after = bisect_right(found, row, key=lambda match: match.spans[0][0])
        first = bisect_left(found, row, hi=after, key=lambda match: match.spans[-1][0])
        return found[first:after]

    # --- all of them ---

    def latest(self, entries: Sequence[Entry], place: int, row: int, lay_out: LayOut) -> Walk[Match | None]:
        """Return the last match that begins above this row of the entry at `place`, else the first one after it."""
        for at in range(min(place, len(entries) - 1), -1, -1):
            yield from self._open(entries[at], lay_out)
            rows = row if at == place else entries[at].height
            for number in reversed(range(_blocks(rows))):
                if found := [match for match in self.block(entries[at], number) if match.spans[0][0] < rows]:
                    return found[-1]
                yield
        return (yield from self._first(entries, place, lay_out))

    def _first(self, entries: Sequence[Entry], place: int, lay_out: LayOut) -> Walk[Match | None]:
        """Return the first match in the entry at `place` or below it; None if there is none."""
        for entry in entries[place:]:
            yield from self._open(entry, lay_out)
            for number in range(_blocks(entry.height)):
                if found := self.block(entry, number):
                    return found[0]
                yield
        return None

    def beside(self, entries: Sequence[Entry], side: int, lay_out: LayOut) -> Walk[Match | None]:
        """Return the match after (1) or before (-1) the current one; after the last comes the first."""
        here = self.here
        if here is None or here.entry not in entries:
            return (yield from self._first(entries, 0, lay_out))
        place = entries.index(here.entry)
        for step in range(len(entries) + 1):  # the entry of `here` comes again at the end
            entry = entries[(place + side * step) % len(entries)]
            yield from self._open(entry, lay_out)
            numbers = range(_blocks(entry.height))
            if not step:
                at = here.spans[0][0] // _BLOCK
                numbers = numbers[at:] if side > 0 else numbers[: at + 1]
            for number in numbers[::side]:
                for match in self.block(entry, number)[::side]:
                    if step or side * _compared(match, here) > 0:
                        return match
                yield
        return here

    def count(self, entries: Sequence[Entry], lay_out: LayOut) -> Walk[tuple[int, int]]:
        """Return the number of the current match (0 if it was not counted), and how many matches there are.

        Counting stops above `MOST`; the total is `MOST` + 1 then.
        """
        number = total = 0
        for entry in entries:
            yield from self._open(entry, lay_out)
            for block in range(_blocks(entry.height)):
                found = self.block(entry, block)
                if self.here is not None and self.here.entry is entry:
                    spans = [match.spans for match in found]
                    number = total + spans.index(self.here.spans) + 1 if self.here.spans in spans else number
                total += len(found)
                if total > MOST:
                    return (number if number <= MOST else 0), MOST + 1
                yield
        return number, total

    def _open(self, entry: Entry, lay_out: LayOut) -> Walk[None]:
        """Lay out an entry; unfold a message first if it holds the text."""
        if isinstance(entry, UserEntry) and entry.is_folded and (yield from self._is_in(entry.text)):
            entry.unfold()
        if isinstance(entry, UserEntry | AnswerEntry):
            while not lay_out(entry):
                yield

    def _is_in(self, text: str) -> Walk[bool]:
        """Return whether a text, of any length, holds a match."""
        if not self.text.split():
            return False
        for start in range(0, len(text), _PIECE):
            if self._pattern.search(text, start, start + _PIECE + _AFTER * (len(self.text) + 1)):
                return True
            yield
        return False


@lru_cache(maxsize=256)
def _kind(style: str) -> tuple[bool, str | None]:
    """Return whether text of this style is searched, and what a line break of this style replaced (None: no break)."""
    names = style.split()
    return not _AROUND.intersection(names), " " if "wrapped" in names else "" if "cut" in names else None


def _row_text(line: Line) -> tuple[str, str]:
    """Return the text of a line (NUL for what is not searched), and what joins it to the next line."""
    text, joint = "", "\n"
    for run, style in line:
        is_text, broken = _kind(style)
        text += run if is_text else "\0" * len(run)
        joint = broken if broken is not None and not run else joint
    return text[INDENT:], joint


def _blocks(rows: int) -> int:
    """Return how many blocks hold this many rows."""
    return -(-rows // _BLOCK)


def _compared(match: Match, other: Match) -> int:
    """Return 1 if `match` begins after `other`, -1 if before it, else 0."""
    mine, others = match.spans[0][:2], other.spans[0][:2]
    return (mine > others) - (mine < others)


def _spans(offsets: list[int], first: int, start: int, end: int) -> tuple[Span, ...]:
    """Return the parts of rows that a match from `start` to `end` covers; `offsets` tells where each row begins, the
    first of them being row `first`.
    """
    spans: list[Span] = []
    at = bisect_right(offsets, start) - 1
    while at < len(offsets) and offsets[at] < end:
        after = offsets[at + 1] if at + 1 < len(offsets) else end
        spans.append(
            (first + at, max(start - offsets[at], 0) + INDENT, min(end, after) - offsets[at] + INDENT)
        )
        at += 1
    return tuple(spans)


def _restyled(line: Sequence[Run], start: int, end: int, style: str) -> Line:
    """Return `line` with one more style on the characters from `start` to `end`."""
    result: Line = []
    at = 0
    for text, names in line:
        first, last = min(max(start - at, 0), len(text)), min(max(end - at, 0), len(text))
        at += len(text)
        parts = [(text[:first], names), (text[first:last], f"{names} {style}".strip()), (text[last:], names)]
        result += [part for part in parts if part[0]] if text else [(text, names)]
    return result
