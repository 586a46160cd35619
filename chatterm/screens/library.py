"""The library picker: lists documents with their progress, cost and savings; opens and removes them."""

import asyncio
from collections.abc import Callable, Sequence, Set
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widgets import Input

from chatterm.backends.backend import CachedChunk
from chatterm.conversation.figures import meter
from chatterm.markdown.lines import Line, cells, elided, line_cells
from chatterm.screens.search_picker import ItemList, SearchPicker
from chatterm.sessions.dates import when_text
from chatterm.sessions.library import DocumentLibrary, LibraryEntry, size_text
from chatterm.sessions.records import SessionError
from chatterm.terminal.sanitize import one_line
from models.units import bytes_text, counted

_LOOK, _READ_AGAIN = 0.25, 1.0
"""Seconds between two updates of the engine's cached documents, and of the library, which other processes change."""
_SIZE, _STATE, _SAVES, _WHEN = 19, 18, 16, 12
"""Columns of the fields after a name."""
_BAR = 10


class LibraryPicker(SearchPicker[LibraryEntry]):
    """Dismisses with the names of documents to begin a conversation with, separated by spaces, or with None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "mark", "Choose one of several", priority=True),
        Binding("ctrl+d", "remove", "Remove", priority=True),
    ]
    DEFAULT_CSS = """
    LibraryPicker > Vertical { max-width: 120; }
    LibraryPicker #picker-about { height: 3; }
    """
    AROUND = 15
    AROUND_LOW = 9
    HEADING = "Library"
    _list: "LibraryList"

    def __init__(
        self,
        library: DocumentLibrary,
        opened: Sequence[str],
        model: str,
        chunks: Callable[[], Sequence[CachedChunk]],
        changed: Callable[[], None],
        removed: Callable[[LibraryEntry], None],
    ) -> None:
        """Show `library`; `opened` are this conversation's documents, `chunks` returns the cached ones at once.

        `changed` is called when the library has changed, `removed` when the person has removed a document.
        """
        super().__init__()
        self._library = library
        self._opened = opened
        self._model = model
        self._chunks = chunks
        self._changed = changed
        self._removed = removed
        self._entries: list[LibraryEntry] | None = None
        self._is_unreadable = False

    def items(self) -> "LibraryList":
        return LibraryList(self._opened, self._model)

    def on_mount(self) -> None:
        self.show_mode()
        self._load()
        self.set_interval(_READ_AGAIN, self._load)
        self.set_interval(_LOOK, self.look)

    def _load(self) -> None:
        self.run_worker(self._read(), exclusive=True)

    async def _read(self) -> None:
        try:
            found = await asyncio.to_thread(self._library.entries)
        except SessionError as error:
            self._say(str(error), "error")
            self._is_unreadable = True
            return
        if self._is_unreadable:
            self._is_unreadable = False
            self._say("")
        known = {(one.name, one.sha256) for one in self._entries or ()}
        is_other = {(one.name, one.sha256) for one in found} != known
        self._entries = found
        self._show()
        if is_other:
            self._changed()

    @on(Input.Changed)
    def _show(self) -> None:
        """Show the documents that match the typed words."""
        words, entries = self._input.value.casefold().split(), self._entries or []
        fitting = [e for e in entries if all(word in f"{e.name} {e.source}".casefold() for word in words)]
        nothing = "No matches." if words else "The library is empty; /library add FILE adds a document."
        self._list.there = {entry.name for entry in entries}
        self._list.show(fitting, nothing if self._entries is not None else "")
        self.show_mode()
        self.look()

    def look(self) -> None:
        self._list.look(self._chunks())
        if (chosen := self._list.chosen) is None:
            self._about([])
            return
        source = elided(one_line(chosen.source, 500), self._about_width)
        self._about([(source, "")], about_text(chosen, self._list.find_chunk(chosen), self._model))

    def question(self, item: LibraryEntry) -> tuple[str, str, str]:
        asked = f"Remove {elided(item.name, 30)}? Conversations that began with it keep it."
        return asked, "y removes it", "n keeps it"

    def offers(self) -> Sequence[tuple[str, str]]:
        order = self._list.order
        begins = (
            f"Enter begins a conversation with {elided(', '.join(order), 40)}" if order else "Enter opens"
        )
        return (
            (begins, "accept"),
            ("Tab chooses several, in order", "mark"),
            ("Ctrl+D removes", "remove"),
            ("Esc goes back", "back"),
        )

    # --- actions ---

    def on_item_list_item_selected(self, message: ItemList.ItemSelected) -> None:
        if self._asking is None:
            self.dismiss(message.key)

    def action_mark(self) -> None:
        """Mark the selected document after those already marked, or unmark it."""
        self.stop_asking()
        self._list.mark()
        self.show_mode()

    def action_accept(self) -> None:
        if self._asking is not None:
            self.action_back()
        elif self._list.order:
            self.dismiss(" ".join(self._list.order))
        elif (chosen := self._list.chosen) is not None:
            self.dismiss(chosen.name)

    def action_remove(self) -> None:
        if (chosen := self._list.chosen) is not None:
            self.ask(chosen)

    def remove_item(self, item: LibraryEntry) -> None:
        self.run_worker(self._removing(item), group="remove")

    async def _removing(self, entry: LibraryEntry) -> None:
        try:
            self._removed(await asyncio.to_thread(self._library.remove, entry.name))
            self._list.drop(entry.name)
        except SessionError as error:
            self._say(str(error), "error")
        self._load()


class LibraryList(ItemList[LibraryEntry]):
    """Documents, one a line; several can be marked, in order."""

    def __init__(self, opened: Sequence[str], model: str) -> None:
        super().__init__()
        self.there: Set[str] = frozenset()
        """The names of all documents, including those not shown."""
        self._marked: list[str] = []
        self._opened = opened
        self._model = model
        self._chunks: tuple[CachedChunk, ...] = ()

    def key(self, item: LibraryEntry) -> str:
        return item.name

    def line(self, item: LibraryEntry, width: int, now: float) -> Line:
        order = self.order
        mark = f"{order.index(item.name) + 1} " if item.name in order else "  "
        if not mark.strip() and item.name in self._opened:
            mark = "▸ "
        return entry_line(item, self.find_chunk(item), self._model, mark, width, now)

    @property
    def order(self) -> list[str]:
        """The marked names that still exist, in order."""
        return [name for name in self._marked if name in self.there]

    def find_chunk(self, entry: LibraryEntry) -> CachedChunk | None:
        """Return the cached chunk of a document alone, else one that includes others; None if there is none."""
        having = [chunk for chunk in self._chunks if entry.name in chunk.name.split(", ")]
        return next((chunk for chunk in having if chunk.name == entry.name), having[0] if having else None)

    def look(self, chunks: Sequence[CachedChunk]) -> None:
        if tuple(chunks) != self._chunks:
            self._chunks = tuple(chunks)
            self.refresh()

    def mark(self) -> None:
        if (chosen := self.chosen) is not None:
            if chosen.name in self._marked:
                self._marked.remove(chosen.name)
            else:
                self._marked.append(chosen.name)
            self.refresh()


def entry_line(
    entry: LibraryEntry, chunk: CachedChunk | None, model: str, mark: str, width: int, now: float
) -> Line:
    """Return a line: mark (two columns), name, size, progress, savings, age; narrow screens drop the last ones."""
    saves = f"saves {bytes_text(chunk.saved_bytes)}" if chunk is not None and chunk.saved_bytes else ""
    columns: list[tuple[Line, int]] = [
        ([(size_text(entry, model), "muted")], _SIZE),
        (state_line(entry, chunk, model), _STATE),
        ([(saves, "accent")], _SAVES),
        ([(when_text(entry.added, now), "muted")], _WHEN),
    ]
    while columns and width - 2 - sum(size + 2 for _, size in columns) < 16:
        columns.pop()
    room = max(width - 2 - sum(size + 2 for _, size in columns), 1)
    name = elided(entry.name, room)
    line: Line = [(mark, "accent"), (name, ""), (" " * (room - cells(name)), "")]
    for runs, size in columns:
        shown = (
            runs if line_cells(runs) <= size else [(elided("".join(text for text, _ in runs), size), "muted")]
        )
        line += [("  ", ""), *shown, (" " * (size - line_cells(shown)), "")]
    return line


def state_line(entry: LibraryEntry, chunk: CachedChunk | None, model: str) -> Line:
    """Return how much of a document is in the cache."""
    if chunk is None:
        if not model:
            return []  # a server's model reads documents with the question
        return [("read" if model in entry.tokens else "not read yet", "muted")]
    share = chunk.present / chunk.tokens
    if not chunk.is_read:
        return [*meter(share, _BAR), (f" {share:.0%}", "muted")]
    return [("in the cache" if share == 1 else f"{share:.0%} in the cache", "muted")]


def about_text(entry: LibraryEntry, chunk: CachedChunk | None, model: str) -> str:
    """Return the size and the savings of a document in the cache, as a line."""
    if chunk is None:
        return "None of it is in the cache now." if model in entry.tokens else ""
    parts = [f"{chunk.present:,} of {counted(chunk.tokens, 'token')} in the cache, {bytes_text(chunk.bytes)}"]
    if chunk.name != entry.name:
        parts[0] = f"{chunk.name}: {parts[0]}"
    if chunk.disk_bytes:
        parts.append(f"{bytes_text(chunk.disk_bytes)} on disk")
    if chunk.branches > 1:
        parts.append(f"{chunk.branches:,} branches share it, which saves {bytes_text(chunk.saved_bytes)}")
    return " · ".join(parts)
