"""Search in entries that are on no screen."""

from collections.abc import Sequence

from chatterm.conversation.entries import Entry
from chatterm.conversation.find import Finder, Match
from chatterm.widgets.slices import at_once


def found_by(finder: Finder, entries: Sequence[Entry], width: int) -> list[Match]:
    """Every match in the entries, laid out at this width, in order."""
    at_once(finder.count(entries, lambda entry: entry.step(width)))
    blocks = [finder.block(entry, number) for entry in entries for number in range(entry.height)]
    return [match for block in blocks for match in block]
