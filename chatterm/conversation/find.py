"""Search in what is shown of a conversation: where a text stands in entries as they are laid out. No widget."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from chatterm.conversation.entries import INDENT, AnswerEntry, Entry, UserEntry
from chatterm.markdown.lines import Line, Run

_AROUND = frozenset(
    "user-bar quote-bar rule bullet code-label code-copy picture branch edited muted warning fold thinking-head".split()  # noqa: SIM905
)
"""Styles of what stands around a text and is not searched."""

Span = tuple[int, int, int]
"""A row of an entry, and the characters of its line from and to which something stands."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """One place, which may go on over several lines."""

    entry: Entry
    spans: tuple[Span, ...]


class Finder:
    """Finds a text, whatever its case and wherever its lines were broken."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pattern = re.compile(r"\s+".join(map(re.escape, text.split())), re.IGNORECASE)
        self._known: dict[Entry, tuple[object, list[Match]]] = {}
        self.here: Match | None = None
        """The one that is looked at."""

    def all(self, entries: Sequence[Entry], width: int) -> list[Match]:
        """Every match in the messages, in order; what was folded and holds one is open then."""
        found: list[Match] = []
        for entry in entries:
            if isinstance(entry, UserEntry) and self.text.split() and self._pattern.search(entry.text):
                entry.unfold()
            entry.lay_out(width)
            found += self.of(entry)
        return found

    def of(self, entry: Entry) -> list[Match]:
        """The matches in an entry as it is laid out."""
        if not isinstance(entry, UserEntry | AnswerEntry) or not self.text.split():
            return []
        known = self._known.get(entry)
        if known is None or known[0] is not entry.layout:
            text, places = _text_of(entry)
            matches = [Match(entry, _spans(places, m.start(), m.end())) for m in self._pattern.finditer(text)]
            known = self._known[entry] = (entry.layout, matches)
        return known[1]

    def marked(self, entry: Entry, row: int, line: Line) -> Line:
        """A line of an entry with what was found in it marked."""
        for match in self.of(entry):
            for at, start, end in match.spans:
                if at == row:
                    here = (
                        self.here is not None and self.here.spans == match.spans and self.here.entry is entry
                    )
                    line = _restyled(line, start, end, "found found-here" if here else "found")
        return line


def _text_of(entry: Entry) -> tuple[str, list[tuple[int, int, int]]]:
    """The text of an entry as it was before its lines were broken; and of each line the offset at which it begins
    there, its row, and how many characters of it stand before that."""
    parts: list[str] = []
    places: list[tuple[int, int, int]] = []
    length = 0
    for row in range(entry.height):
        line = entry.line(row)
        text, joint = "", "\n"
        for run in line:
            text += "\0" * len(run[0]) if _AROUND.intersection(run[1].split()) else run[0]
            names = run[1].split()
            joint = joint if run[0] else " " if "wrapped" in names else "" if "cut" in names else joint
        places.append((length, row, INDENT))
        parts += [text[INDENT:], joint]
        length += len(parts[-2]) + len(joint)
    return "".join(parts), places


def _spans(places: list[tuple[int, int, int]], start: int, end: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    for number, (offset, row, skipped) in enumerate(places):
        after = places[number + 1][0] if number + 1 < len(places) else end
        first, last = max(start, offset), min(end, after)
        if first < last:
            spans.append((row, first - offset + skipped, last - offset + skipped))
    return tuple(spans)


def _restyled(line: Sequence[Run], start: int, end: int, style: str) -> Line:
    """`line` with one more style on some of its characters."""
    result: Line = []
    at = 0
    for text, names in line:
        first, last = min(max(start - at, 0), len(text)), min(max(end - at, 0), len(text))
        at += len(text)
        parts = [(text[:first], names), (text[first:last], f"{names} {style}".strip()), (text[last:], names)]
        result += [part for part in parts if part[0]] if text else [(text, names)]
    return result
