"""The library picker: what there is, how far it is read, what it takes and saves; open, remove."""

import asyncio
from collections.abc import Callable, Sequence
from time import time
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from chatterm.backends.backend import Chunk
from chatterm.conversation.figures import meter
from chatterm.markdown.lines import Line, cells, elided, line_cells, padded, styled
from chatterm.screens.notes import Choices, Note
from chatterm.screens.picker import Picker, PickerList
from chatterm.sessions.dates import when_text
from chatterm.sessions.library import Entry, Library, size_text
from chatterm.sessions.records import SessionError
from chatterm.terminal.sanitize import one_line
from models.units import bytes_text, counted

_LOOK, _READ_AGAIN = 0.25, 1.0
"""Seconds between two looks at what the engine has, and at what other processes have added."""
_SIZE, _STATE, _SAVES, _WHEN = 19, 18, 16, 12
"""Columns of what stands behind a name."""
_BAR = 10


class LibraryPicker(Picker):
    """Dismisses with the names to begin a conversation on, a space between them, or with None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "mark", "Choose one of several", priority=True),
        Binding("ctrl+d", "remove", "Remove", priority=True),
    ]
    DEFAULT_CSS = """
    LibraryPicker > Vertical { max-width: 120; }
    LibraryPicker LibraryList { height: auto; }
    LibraryPicker #library-about { margin-top: 1; height: 3; }
    LibraryPicker #library-note { display: none; margin-top: 1; }
    LibraryPicker #library-foot { margin-top: 1; }
    """
    AROUND = 15

    def __init__(
        self,
        library: Library,
        opened: Sequence[str],
        model: str,
        chunks: Callable[[], Sequence[Chunk]],
        changed: Callable[[], None],
        removed: Callable[[Entry], None],
    ) -> None:
        """On `opened` the conversation was begun. `chunks` says what the engine has, and returns at once. `changed` is
        called when the library is another than it was, `removed` when the person has removed a document."""
        super().__init__()
        self._library = library
        self._opened = opened
        self._model = model
        self._chunks = chunks
        self._changed = changed
        self._removed = removed
        self._entries: list[Entry] | None = None
        self._asking: Entry | None = None
        """The document that is to be removed when the person says yes."""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Note(id="library-head")
            yield Input(placeholder="Type to search")
            yield LibraryList(self._opened, self._model)
            yield Note(id="library-about")
            yield Note(id="library-note")
            yield Choices(id="library-foot")

    def on_mount(self) -> None:
        self._input = self.query_one(Input)
        self._list = self.query_one(LibraryList)
        self._show_mode()
        self._load()
        self.set_interval(_READ_AGAIN, self._load)
        self.set_interval(_LOOK, self._look)

    def _load(self) -> None:
        self.run_worker(self._read(), exclusive=True)

    async def _read(self) -> None:
        try:
            found = await asyncio.to_thread(self._library.entries)
        except SessionError as error:
            self._say(str(error), "error")
            return
        known = {(one.name, one.sha256) for one in self._entries or ()}
        is_other = {(one.name, one.sha256) for one in found} != known
        self._entries = found
        self._show()
        if is_other:
            self._changed()

    @on(Input.Changed)
    def _show(self) -> None:
        """What fits the words that are typed."""
        words, entries = self._input.value.casefold().split(), self._entries or []
        fitting = [e for e in entries if all(word in f"{e.name} {e.source}".casefold() for word in words)]
        nothing = "No matches." if words else "The library is empty; /library add FILE adds a document."
        self._list.show(fitting, nothing if self._entries is not None else "")
        self._show_mode()
        self._look()

    def _look(self) -> None:
        self._list.look(self._chunks())
        chosen, note = self._list.chosen, self.query_one("#library-about", Note)
        if chosen is None:
            note.show([])
            return
        source = elided(one_line(chosen.source, 500), max(note.size.width, 8))
        about = about_text(chosen, self._list.chunk_of(chosen), self._model)
        note.show([(source, ""), ("\n", ""), (about, "muted")])

    def _say(self, text: str, style: str = "muted") -> None:
        note = self.query_one("#library-note", Note)
        note.display = bool(text)
        note.show([(text, style)])

    def _show_mode(self) -> None:
        count = len(self._list.entries)
        head: Line = [("Library", "heading"), (f"  {count:,}" if count else "", "muted")]
        self.query_one("#library-head", Note).show(head)
        foot = self.query_one("#library-foot", Choices)
        if self._asking is not None:
            question = f"Remove {elided(self._asking.name, 30)}? Conversations that were begun on it keep it."
            foot.offer((question, ""), ("y removes it", "confirm"), ("n keeps it", "back"))
            return
        order = self._list.order
        begins = f"Enter begins a conversation on {elided(', '.join(order), 40)}" if order else "Enter opens"
        foot.offer(
            (begins, "accept"),
            ("Tab chooses several, in order", "mark"),
            ("Ctrl+D removes", "remove"),
            ("Esc goes back", "back"),
        )

    def on_choices_chosen(self, message: Choices.Chosen) -> None:
        {
            "accept": self.action_accept,
            "mark": self.action_mark,
            "remove": self.action_remove,
            "back": self.action_back,
            "confirm": self._remove,
        }[message.action]()

    # --- what the person does ---

    def on_key(self, event: events.Key) -> None:
        if self._asking is not None:
            event.stop()
            event.prevent_default()
            if event.key in ("y", "Y"):
                self._remove()
            else:
                self.action_back()

    def on_library_list_chosen(self, message: "LibraryList.Chosen") -> None:
        if self._asking is None:
            self.dismiss(message.name)

    def action_move(self, step: int) -> None:
        self._stop_asking()
        self._list.move(step)
        self._look()

    def action_mark(self) -> None:
        """Choose a document behind those that are chosen, or no longer."""
        self._stop_asking()
        self._list.mark()
        self._show_mode()

    def action_accept(self) -> None:
        if self._asking is not None:
            self.action_back()
        elif self._list.order:
            self.dismiss(" ".join(self._list.order))
        elif (chosen := self._list.chosen) is not None:
            self.dismiss(chosen.name)

    def action_back(self) -> None:
        if self._asking is not None:
            self._stop_asking()
        else:
            self.dismiss(None)

    def action_remove(self) -> None:
        if (chosen := self._list.chosen) is not None:
            self._asking = chosen
            self.set_focus(None)  # or the answer would be typed into the search
            self._say("")
            self._show_mode()

    def _remove(self) -> None:
        if (entry := self._asking) is not None:
            self._stop_asking()
            self.run_worker(self._removing(entry), group="remove")

    async def _removing(self, entry: Entry) -> None:
        try:
            self._removed(await asyncio.to_thread(self._library.remove, entry.name))
        except SessionError as error:
            self._say(str(error), "error")
        self._load()

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking = None
            self._input.focus()
            self._show_mode()


class LibraryList(PickerList):
    """Documents, one a line, one of them chosen and several marked in an order."""

    class Chosen(Message):
        """A document was clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, opened: Sequence[str], model: str) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._marked: list[str] = []
        self._opened = opened
        self._model = model
        self._chunks: tuple[Chunk, ...] = ()
        self._nothing = ""

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def chosen(self) -> Entry | None:
        return self.entries[self._index] if self.entries else None

    @property
    def order(self) -> list[str]:
        """The names that are marked and there."""
        names = {entry.name for entry in self.entries}
        return [name for name in self._marked if name in names]

    def chunk_of(self, entry: Entry) -> Chunk | None:
        """What the engine has of a document: alone, else with others before or behind it."""
        having = [chunk for chunk in self._chunks if entry.name in chunk.name.split(", ")]
        return next((chunk for chunk in having if chunk.name == entry.name), having[0] if having else None)

    def show(self, entries: list[Entry], nothing: str) -> None:
        """These are there; the chosen one stays chosen where it is among them. `nothing` is said of an empty list."""
        before = self.chosen
        self.entries, self._nothing = entries, nothing
        names = [entry.name for entry in entries]
        known = names.index(before.name) if before is not None and before.name in names else None
        self._index = known if known is not None else min(self._index, max(len(names) - 1, 0))
        self.resized()

    def look(self, chunks: Sequence[Chunk]) -> None:
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

    def on_click(self, event: events.Click) -> None:
        row = self.clicked(event)
        if row is not None:
            event.stop()
            self._index = row
            self.refresh()
            self.post_message(self.Chosen(self.entries[row].name))

    def build(self, width: int) -> list[Line]:
        if not self.entries:
            return [[(elided(self._nothing, width), "muted")]]
        now, order = time(), self.order
        lines: list[Line] = []
        for row in self.in_view():
            entry = self.entries[row]
            mark = f"{order.index(entry.name) + 1} " if entry.name in order else "  "
            if not mark.strip() and entry.name in self._opened:
                mark = "▸ "
            line = entry_line(entry, self.chunk_of(entry), self._model, mark, width, now)
            lines.append(styled(padded(line, width, ""), "chosen") if row == self._index else line)
        return lines


def entry_line(entry: Entry, chunk: Chunk | None, model: str, mark: str, width: int, now: float) -> Line:
    """A mark of two columns, the name, how long it is, how far it is read, what that saves, when it was added; on
    narrow screens the last go first."""
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


def state_line(entry: Entry, chunk: Chunk | None, model: str) -> Line:
    """How far a document is read."""
    if chunk is None:
        if not model:
            return []  # that of a server, which reads with the question
        return [("read" if model in entry.tokens else "not read yet", "muted")]
    share = chunk.present / chunk.tokens
    if not chunk.is_read:
        filled, empty = meter(share, _BAR)
        return [(filled, "primary"), (empty, "rule"), (f" {share:.0%}", "muted")]
    return [("in the cache" if share == 1 else f"{share:.0%} in the cache", "muted")]


def about_text(entry: Entry, chunk: Chunk | None, model: str) -> str:
    """What a document takes and saves, in a line."""
    if chunk is None:
        return "Nothing of it is in the cache now." if model in entry.tokens else ""
    parts = [f"{chunk.present:,} of {counted(chunk.tokens, 'token')} in the cache, {bytes_text(chunk.bytes)}"]
    if chunk.name != entry.name:
        parts[0] = f"{chunk.name}: {parts[0]}"
    if chunk.disk_bytes:
        parts.append(f"{bytes_text(chunk.disk_bytes)} on disk")
    if chunk.branches > 1:
        parts.append(f"{chunk.branches:,} branches stand on it, which saves {bytes_text(chunk.saved_bytes)}")
    return " · ".join(parts)
