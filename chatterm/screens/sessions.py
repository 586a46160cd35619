"""The session picker: search, choose, rename, delete."""

import asyncio
import re
from time import time
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from chatterm.markdown.lines import Line, cells, elided, padded, styled
from chatterm.screens.notes import Choices, Note
from chatterm.screens.picker import Picker, PickerList
from chatterm.sessions.dates import when_text
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.store import Store
from chatterm.sessions.titles import extent_text, given_title, messages_text
from chatterm.terminal.sanitize import one_line
from models.units import counted

_PAUSE = 0.05
"""Seconds without a key before the database is searched."""
_SEARCH = "Type to search"
_COUNT, _MODEL, _WHEN = 14, 18, 12
"""Columns of what stands behind a title."""


class SessionPicker(Picker):
    """Dismisses with the id of the chosen session, or with None. Nothing here waits for the disk.

    `current`, the session that one is in, is marked and cannot be deleted.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2,ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
    ]
    DEFAULT_CSS = """
    SessionPicker > Vertical { max-width: 110; }
    SessionPicker SessionList { height: auto; }
    SessionPicker #session-preview { margin-top: 1; height: 2; }
    SessionPicker #session-note { display: none; margin-top: 1; }
    SessionPicker #session-foot { margin-top: 1; }
    """
    AROUND = 14

    def __init__(self, store: Store, current: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._asking: SessionInfo | None = None
        """The session that is to be deleted when the person says yes."""
        self._renaming: SessionInfo | None = None
        self._searched = ""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Note(id="session-head")
            yield Input(placeholder=_SEARCH)
            yield SessionList(self._current)
            yield Note(id="session-preview")
            yield Note(id="session-note")
            yield Choices(id="session-foot")

    def on_mount(self) -> None:
        self._input = self.query_one(Input)
        self._list = self.query_one(SessionList)
        self._show_mode()
        self._look(0.0)

    # --- searching ---

    @on(Input.Changed)
    def _typed(self) -> None:
        if self._renaming is None and self._input.value != self._searched:
            self._searched = self._input.value
            self._say("")
            self._look(_PAUSE)

    def _look(self, pause: float) -> None:
        self.run_worker(self._find(self._searched, pause), exclusive=True)

    async def _find(self, text: str, pause: float) -> None:
        await asyncio.sleep(pause)
        try:
            found = await asyncio.to_thread(self._store.find, text)
        except SessionError as error:
            self._say(str(error), "error")
            return
        self._list.show(found, nothing="No matches." if text.strip() else "There are no sessions yet.")
        if self._store.problem:
            self._say(self._store.problem, "warning")
        self._show_mode()
        self._preview()

    def _preview(self) -> None:
        """Show what the chosen session is about: the line that matches best, and how much there is of it."""
        self.run_worker(self._look_into(self._list.chosen, self._searched), group="preview", exclusive=True)

    async def _look_into(self, info: SessionInfo | None, text: str) -> None:
        note = self.query_one("#session-preview", Note)
        if info is None:
            note.show([])
            return
        try:
            line = await asyncio.to_thread(self._store.preview, info.id, text)
        except SessionError:  # the list says so, too
            line = ""
        about = f"{extent_text(info)} · {counted(info.tokens, 'token')} generated"
        note.show(
            [*marked_words(elided(line, max(note.size.width, 8)), text.split()), ("\n", ""), (about, "muted")]
        )

    # --- what is shown besides the list ---

    def _say(self, text: str, style: str = "muted") -> None:
        note = self.query_one("#session-note", Note)
        note.display = bool(text)
        note.show([(text, style)])

    def _show_mode(self) -> None:
        head = self.query_one("#session-head", Note)
        foot = self.query_one("#session-foot", Choices)
        if self._asking is not None:
            head.show([("Sessions", "heading")])
            question = f"Delete “{elided(self._asking.title, 30)}” and all of its branches?"
            foot.offer((question, ""), ("y deletes it", "confirm"), ("n keeps it", "back"))
        elif self._renaming is not None:
            head.show([("New title", "heading")])
            foot.offer(("Enter renames", "accept"), ("Esc keeps the old one", "back"))
        else:
            count = len(self._list.sessions)
            head.show([("Sessions", "heading"), (f"  {count:,}" if count else "", "muted")])
            foot.offer(
                ("Enter opens", "accept"),
                ("F2 renames", "rename"),
                ("Ctrl+D deletes", "delete"),
                ("Esc goes back", "back"),
            )

    def on_choices_chosen(self, message: "Choices.Chosen") -> None:
        {
            "accept": self.action_accept,
            "rename": self.action_rename,
            "delete": self.action_delete,
            "back": self.action_back,
            "confirm": self._delete,
        }[message.action]()

    # --- what the person does ---

    def on_key(self, event: events.Key) -> None:
        if self._asking is not None:
            event.stop()
            event.prevent_default()
            if event.key in ("y", "Y"):
                self._delete()
            else:
                self.action_back()

    def on_session_list_chosen(self, message: "SessionList.Chosen") -> None:
        if self._asking is None and self._renaming is None:
            self.dismiss(message.session)

    def action_move(self, step: int) -> None:
        if self._renaming is None:
            self._stop_asking()
            self._list.move(step)
            self._preview()

    def action_accept(self) -> None:
        chosen = self._list.chosen
        if self._asking is not None:
            self.action_back()
        elif self._renaming is not None:
            self._rename(self._renaming)
        elif chosen is not None:
            self.dismiss(chosen.id)

    def action_back(self) -> None:
        if self._renaming is not None:
            self._end_renaming()
        elif self._asking is not None:
            self._stop_asking()
        else:
            self.dismiss(None)

    def action_rename(self) -> None:
        chosen = self._list.chosen
        if chosen is not None and self._renaming is None:
            self._stop_asking()
            self._renaming = chosen
            self._input.value = chosen.title
            self._input.cursor_position = len(chosen.title)
            self._input.focus()
            self._show_mode()

    def _rename(self, session: SessionInfo) -> None:
        try:
            title = given_title(self._input.value)
        except SessionError as error:
            self._say(str(error), "error")
            return
        self._store.rename(session.id, title)
        session.title = title
        self._end_renaming()
        self._look(0.0)

    def _end_renaming(self) -> None:
        self._renaming = None
        self._input.value = self._searched
        self._input.cursor_position = len(self._searched)
        self._say("")
        self._show_mode()

    def action_delete(self) -> None:
        chosen = self._list.chosen
        if chosen is None or self._renaming is not None:
            return
        if chosen.id == self._current:
            self._say("This session is open; start another one before you delete it.", "warning")
            return
        self._asking = chosen
        self.set_focus(None)  # or the answer would be typed into the search
        self._say("")
        self._show_mode()

    def _delete(self) -> None:
        if self._asking is not None:
            self._store.delete(self._asking.id)
            self._list.drop(self._asking.id)
            self._stop_asking()
            self._look(0.0)

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking = None
            self._input.focus()
            self._show_mode()


class SessionList(PickerList):
    """Sessions, one a line, one of them chosen."""

    class Chosen(Message):
        """A session was clicked."""

        def __init__(self, session: str) -> None:
            super().__init__()
            self.session = session

    def __init__(self, current: str | None) -> None:
        super().__init__()
        self.sessions: list[SessionInfo] = []
        self._current = current
        self._nothing = ""

    @property
    def count(self) -> int:
        return len(self.sessions)

    @property
    def chosen(self) -> SessionInfo | None:
        return self.sessions[self._index] if self.sessions else None

    def show(self, sessions: list[SessionInfo], nothing: str) -> None:
        """These are found; the chosen one stays chosen where it is among them. `nothing` is said of an empty list."""
        before = self.chosen
        self.sessions, self._nothing = sessions, nothing
        ids = [session.id for session in sessions]
        self._index = ids.index(before.id) if before is not None and before.id in ids else 0
        self.resized()

    def drop(self, id: str) -> None:
        self.sessions = [session for session in self.sessions if session.id != id]
        self._index = min(self._index, max(len(self.sessions) - 1, 0))
        self.resized()

    def on_click(self, event: events.Click) -> None:
        row = self.clicked(event)
        if row is not None:
            event.stop()
            self._index = row
            self.refresh()
            self.post_message(self.Chosen(self.sessions[row].id))

    def build(self, width: int) -> list[Line]:
        if not self.sessions:
            return [[(self._nothing, "muted")]]
        now = time()
        return [
            session_line(info, width, now, chosen=row == self._index, current=info.id == self._current)
            for row, info in ((row, self.sessions[row]) for row in self.in_view())
        ]


def marked_words(line: str, words: list[str]) -> Line:
    """A line with every occurrence of the words marked."""
    if not words:
        return [(line, "")]
    pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
    runs: Line = []
    at = 0
    for match in pattern.finditer(line):
        runs += [(line[at : match.start()], ""), (match[0], "found")]
        at = match.end()
    return [run for run in (*runs, (line[at:], "")) if run[0]]


def session_line(info: SessionInfo, width: int, now: float, *, chosen: bool, current: bool) -> Line:
    """A mark, the title, messages, model, when it was used; on narrow screens the model goes first."""
    columns = [
        (messages_text(info.messages), _COUNT),
        (one_line(info.model, 100), _MODEL),
        (when_text(info.updated, now), _WHEN),
    ]
    while columns and width - 2 - sum(size + 2 for _, size in columns) < 24:
        columns.pop(1 if len(columns) == 3 else 0)
    room = max(width - 2 - sum(size + 2 for _, size in columns), 4)
    title = elided(info.title, room)
    line: Line = [("● " if current else "  ", "primary"), (title, ""), (" " * (room - cells(title)), "")]
    for text, size in columns:
        text = elided(text, size)
        line += [("  ", ""), (text, "muted"), (" " * (size - cells(text)), "")]
    return styled(padded(line, width, ""), "chosen") if chosen else line
