"""The session picker: search, choose, rename, delete."""

import asyncio
import re
from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widgets import Input

from chatterm.markdown.lines import Line, cells, elided
from chatterm.screens.search_picker import ItemList, SearchPicker
from chatterm.sessions.dates import when_text
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.titles import extent_text, given_title, messages_text
from chatterm.terminal.sanitize import one_line
from models.units import counted

_PAUSE = 0.05
"""Seconds without a key before the database is searched."""
_COUNT, _MODEL, _WHEN = 14, 18, 12
"""Columns of the fields after a title."""


class SessionPicker(SearchPicker[SessionInfo]):
    """Dismisses with the id of the chosen session, or with None. The disk is read in threads.

    `current`, the open session, is marked and cannot be deleted.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2,ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
    ]
    DEFAULT_CSS = """
    SessionPicker > Vertical { max-width: 110; }
    SessionPicker #picker-about { height: 2; }
    """
    AROUND = 14
    AROUND_LOW = 8
    HEADING = "Sessions"

    def __init__(self, store: SessionStore, current: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._renaming: SessionInfo | None = None
        self._searched = ""

    def items(self) -> "SessionList":
        return SessionList(self._current)

    def on_mount(self) -> None:
        self.show_mode()
        self._search(0.0)

    # --- searching ---

    @on(Input.Changed)
    def _typed(self) -> None:
        if self._renaming is None and self._input.value != self._searched:
            self._searched = self._input.value
            self._say("")
            self._search(_PAUSE)

    def _search(self, pause: float) -> None:
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
        self.show_mode()
        self.look()

    def look(self) -> None:
        """Show the best matching line of the selected session, and the session's length."""
        self.run_worker(self._look_into(self._list.chosen, self._searched), group="look", exclusive=True)

    async def _look_into(self, info: SessionInfo | None, text: str) -> None:
        if info is None:
            self._about([])
            return
        try:
            line = await asyncio.to_thread(self._store.preview, info.id, text)
        except SessionError:  # the list reports it, too
            line = ""
        about = extent_text(info)
        if info.tokens:  # tokens of remote models are not counted
            about += f" · {counted(info.tokens, 'token')} generated"
        self._about(marked_words(elided(line, self._about_width), text.split()) or [("", "")], about)

    # --- around the list ---

    def show_mode(self) -> None:
        if self._renaming is not None:
            self._head("New title")
            self._offer(("Enter renames", "accept"), ("Esc keeps the old one", "back"))
        else:
            super().show_mode()

    def question(self, item: SessionInfo) -> tuple[str, str, str]:
        return f"Delete “{elided(item.title, 30)}” and all of its branches?", "y deletes it", "n keeps it"

    def offers(self) -> Sequence[tuple[str, str]]:
        return (
            ("Enter opens", "accept"),
            ("F2 renames", "rename"),
            ("Ctrl+D deletes", "delete"),
            ("Esc goes back", "back"),
        )

    # --- actions ---

    def on_item_list_item_selected(self, message: ItemList.ItemSelected) -> None:
        if self._asking is None and self._renaming is None:
            self.dismiss(message.key)

    def action_move(self, step: int) -> None:
        if self._renaming is None:
            super().action_move(step)

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
        else:
            super().action_back()

    def action_rename(self) -> None:
        chosen = self._list.chosen
        if chosen is not None and self._renaming is None:
            self.stop_asking()
            self._renaming = chosen
            self._input.value = chosen.title
            self._input.cursor_position = len(chosen.title)
            self._input.focus()
            self.show_mode()

    def _rename(self, session: SessionInfo) -> None:
        try:
            title = given_title(self._input.value)
        except SessionError as error:
            self._say(str(error), "error")
            return
        self._store.rename(session.id, title)
        session.title = title
        self._end_renaming()
        self._search(0.0)

    def _end_renaming(self) -> None:
        self._renaming = None
        self._input.value = self._searched
        self._input.cursor_position = len(self._searched)
        self._say("")
        self.show_mode()

    def action_delete(self) -> None:
        chosen = self._list.chosen
        if chosen is None or self._renaming is not None:
            return
        if chosen.id == self._current:
            self._say("This session is open; start another one before you delete it.", "warning")
            return
        self.ask(chosen)

    def remove_item(self, item: SessionInfo) -> None:
        self._store.delete(item.id)
        self._list.drop(item.id)
        self._search(0.0)


class SessionList(ItemList[SessionInfo]):
    """Sessions, one a line."""

    def __init__(self, current: str | None) -> None:
        super().__init__()
        self._current = current

    def key(self, item: SessionInfo) -> str:
        return item.id

    def line(self, item: SessionInfo, width: int, now: float) -> Line:
        return session_line(item, width, now, current=item.id == self._current)


def marked_words(line: str, words: list[str]) -> Line:
    """Return a line with every occurrence of the words marked."""
    if not words:
        return [(line, "")]
    pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
    runs: Line = []
    at = 0
    for match in pattern.finditer(line):
        runs += [(line[at : match.start()], ""), (match[0], "found")]
        at = match.end()
    return [run for run in (*runs, (line[at:], "")) if run[0]]


def session_line(info: SessionInfo, width: int, now: float, *, current: bool) -> Line:
    """Return a line: mark, title, messages, model, last use; narrow screens drop the model first."""
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
    return line
