"""Entries below each other: which there are, and where each begins."""

from collections.abc import Iterable, Sequence
from itertools import count

from chatterm.conversation.entries import Entry
from chatterm.widgets.stack import Stack


class Column:
    """Entries in order, an empty line below each."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.places: dict[Entry, int] = {}
        """The index of each entry in `entries`."""
        self.stack = Stack()
        """Where each entry begins in the latest layout."""
        self.stale: set[Entry] = set()
        """Entries that have to be laid out."""

    def add(self, entries: Iterable[Entry], width: int) -> None:
        """Put entries below the others; `width` is that of the layout, in columns."""
        added = list(entries)
        self.places.update(zip(added, count(len(self.entries))))
        self.entries += added
        self.stale.update(entry for entry in added if not entry.is_laid_out(width))
        for entry in added:
            self.stack.add(rows_of(entry))
            if entry.on_change is None:  # else another column has it: the head, which is in the next one, too
                entry.on_change = self.stale.add

    def cut(self, place: int) -> Sequence[Entry]:
        """Take out the entries from `place` on, and return them."""
        gone = self.entries[place:]
        for entry in gone:
            entry.on_change = None
            del self.places[entry]
        self.stale.difference_update(gone)
        del self.entries[place:]
        self.stack.cut(place)
        return gone


def rows_of(entry: Entry) -> int:
    """Return the rows that an entry takes, with the empty one below it."""
    return entry.height + (not entry.is_blank)
