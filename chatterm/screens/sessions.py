"""The session picker: search, choose, rename, delete."""

import asyncio
from time import time
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input

from chatterm.markdown.lines import Line, cells, elided, padded, styled, wrap
from chatterm.sanitize import one_line
from chatterm.sessions.dates import when_text
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.store import Store
from chatterm.sessions.titles import given_title, messages_text
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas

_PAUSE = 0.05
"""Seconds without a key before the database is searched."""
_SEARCH = "Type to search"
_COUNT, _MODEL, _WHEN = 14, 18, 12
"""Columns of what stands behind a title."""


class SessionPicker(ModalScreen[str | None]):
    """Dismisses with the id of the chosen session, or with None. Nothing here waits for the disk.

    `current`, the session that one is in, is marked and cannot be deleted.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "back", "Back", priority=True),
        Binding("up", "move(-1)", "Up", priority=True),
        Binding("down", "move(1)", "Down", priority=True),
        Binding("pageup", "move(-10)", "Page up", priority=True),
        Binding("pagedown", "move(10)", "Page down", priority=True),
        Binding("enter", "accept", "Open", priority=True),
        Binding("f2,ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
    ]
    DEFAULT_CSS = """
    SessionPicker { align: center middle; background: $background 70%; }
    SessionPicker > Vertical {
        width: 92%; max-width: 110; height: auto; max-height: 90%; padding: 1 2; background: $surface;
    }
    SessionPicker Input, SessionPicker Input:focus {
        border: none; height: 1; padding: 0; margin: 1 0; background: $panel; color: $foreground;
    }
    SessionPicker SessionList { height: auto; }
    SessionPicker Note { height: auto; }
    SessionPicker #session-note { display: none; margin-top: 1; }
    SessionPicker #session-foot { margin-top: 1; }
    """

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
            yield Note(id="session-note")
            yield Choices(id="session-foot")

    def on_mount(self) -> None:
        self._input = self.query_one(Input)
        self._list = self.query_one(SessionList)
        self._show_mode()
        self._look(0.0)

    def on_resize(self, event: events.Resize) -> None:
        # All but the list takes 10 lines at most; what does not fit is scrolled to.
        self._list.styles.max_height = max(event.size.height * 9 // 10 - 10, 1)

    # --- searching ---

    @on(Input.Changed)
    def _typed(self) -> None:
        if self._renaming is None and self._input.value != self._searched:
            self._searched = self._input.value
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
        self._list.show(found, nothing="Nothing matches." if text.strip() else "There are no sessions yet.")
        self._say(self._store.problem, "warning")
        self._show_mode()

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
            head.show([("A new title", "heading")])
            foot.offer(("Enter takes it", "accept"), ("Esc keeps the old one", "back"))
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
            self._say("You are in this session; begin another one before you delete it.", "warning")
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


class Note(Canvas):
    """A text of as many lines as it takes."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._runs: Line = []

    def show(self, runs: Line) -> None:
        self._runs = runs
        self.refresh(layout=True)

    def build(self, width: int) -> list[Line]:
        return wrap(self._runs, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width))


class Choices(Note):
    """What can be done: parts that can be clicked, with a dot between them where they share a line."""

    class Chosen(Message):
        """A part was clicked."""

        def __init__(self, action: str) -> None:
            super().__init__()
            self.action = action

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._parts: tuple[tuple[str, str], ...] = ()

    def offer(self, *parts: tuple[str, str]) -> None:
        """Texts, and the action of each; "" for a text that only says something."""
        self._parts = parts
        self.refresh(layout=True)

    def _rows(self, width: int) -> list[list[tuple[int, str, str]]]:
        """Lines of (column, text, action)."""
        rows: list[list[tuple[int, str, str]]] = [[]]
        column = 0
        for text, action in self._parts:
            if rows[-1] and column + 3 + cells(text) > width:
                rows.append([])
            column = column + 3 if rows[-1] else 0
            rows[-1].append((column, elided(text, width), action))
            column += cells(text)
        return rows

    def build(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for row in self._rows(width):
            lines.append([])
            for _, text, action in row:
                lines[-1] += [(" · ", "muted")] if lines[-1] else []
                lines[-1].append((text, "muted" if action else "warning"))
        return lines

    def on_click(self, event: events.Click) -> None:
        rows = self._rows(self.size.width)
        for column, text, action in rows[event.y] if event.y < len(rows) else ():
            if action and column <= event.x < column + cells(text):
                event.stop()
                self.post_message(self.Chosen(action))


class SessionList(Canvas):
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
        self._index = 0
        self._first = 0

    @property
    def chosen(self) -> SessionInfo | None:
        return self.sessions[self._index] if self.sessions else None

    def show(self, sessions: list[SessionInfo], nothing: str) -> None:
        """These are found; the chosen one stays chosen where it is among them. `nothing` is said of an empty list."""
        before = self.chosen
        self.sessions, self._nothing = sessions, nothing
        ids = [session.id for session in sessions]
        self._index = ids.index(before.id) if before is not None and before.id in ids else 0
        self._resized()

    def drop(self, id: str) -> None:
        self.sessions = [session for session in self.sessions if session.id != id]
        self._index = min(self._index, max(len(self.sessions) - 1, 0))
        self._resized()

    def move(self, step: int) -> None:
        """Choose another, `step` lines further."""
        self._index = min(max(self._index + step, 0), max(len(self.sessions) - 1, 0))
        self.refresh()

    def _resized(self) -> None:
        self.styles.height = max(len(self.sessions), 1)
        self.refresh(layout=True)

    def on_click(self, event: events.Click) -> None:
        row = self._first + event.y
        if row < len(self.sessions):
            event.stop()
            self._index = row
            self.refresh()
            self.post_message(self.Chosen(self.sessions[row].id))

    def on_mouse_scroll_up(self) -> None:
        self.move(-1)

    def on_mouse_scroll_down(self) -> None:
        self.move(1)

    def build(self, width: int) -> list[Line]:
        if not self.sessions:
            return [[(self._nothing, "muted")]]
        height = max(self.size.height, 1)
        self._first = min(max(self._first, self._index - height + 1), self._index, len(self.sessions) - 1)
        now = time()
        shown = self.sessions[self._first : self._first + height]
        return [
            session_line(
                info, width, now, chosen=self._first + row == self._index, current=info.id == self._current
            )
            for row, info in enumerate(shown)
        ]


def session_line(info: SessionInfo, width: int, now: float, *, chosen: bool, current: bool) -> Line:
    """A mark, the title, messages, model, when it was used; on narrow screens the model goes first."""
    columns = [
        (messages_text(info.exchanges), _COUNT),
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
