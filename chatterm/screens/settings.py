"""/settings: every setting with its meaning; changes are written to the settings file."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from chatterm.backends.backend import EngineError
from chatterm.commands.sampling import value_text
from chatterm.markdown.lines import Line, cells, elided, line_text, padded, styled, wrap
from chatterm.screens.picker import Picker, PickerList
from chatterm.screens.report import BoxHead
from chatterm.settings.file import store
from chatterm.settings.reading import load_settings, problem_with
from chatterm.settings.settings import Settings
from chatterm.settings.text import KnownSetting, known_settings, parsed, table_docs
from chatterm.terminal.sanitize import one_line
from chatterm.widgets.canvas import Canvas

_AT_ONCE = {"screen.theme", "screen.panel", "screen.thinking", "screen.tint", "composer.prepare_drafts"}
_NAME = 20
"""Columns of a setting's name."""


class SettingsScreen(Picker):
    """Changes one setting at a time; `apply` then gets all settings, and the table and name of the changed one."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "turn(-1)", "Previous choice"),
        Binding("right,space", "turn(1)", "Next choice"),
        Binding("delete,backspace", "default", "Reset to the default"),
        Binding("f8,q", "back", "Back to the conversation"),
    ]
    DEFAULT_CSS = """
    SettingsScreen > Vertical { max-width: 100; }
    SettingsScreen Input, SettingsScreen Input:focus { display: none; margin: 0; }
    SettingsScreen.-editing Input { display: block; }
    SettingsScreen Detail { height: 4; margin-top: 1; }
    SettingsScreen.-editing Detail { height: 3; }
    SettingsScreen.-narrow > Vertical { width: 100%; height: 100%; max-height: 100%; padding: 0 1; }
    SettingsScreen.-narrow Detail { margin-top: 0; }
    """
    AROUND = 9

    def __init__(self, settings: Settings, path: Path, apply: Callable[[Settings, str, str], None]) -> None:
        super().__init__()
        self._settings = settings
        self._path = path
        self._apply = apply

    def compose(self) -> ComposeResult:
        with Vertical():
            keys = ("Enter changes · Del default · Esc closes", "Esc closes")
            yield BoxHead("Settings", keys)
            yield SettingsList(self._settings)
            yield Detail()
            yield Input()

    def on_mount(self) -> None:
        self._list = self.query_one(SettingsList)
        self._detail = self.query_one(Detail)
        self._input = self.query_one(Input)
        self._tell()

    def on_resize(self, event: events.Resize) -> None:
        event.prevent_default()  # not the picker's layout
        narrow = event.size.width < 60 or event.size.height < 20
        self.set_class(narrow, "-narrow")
        height = event.size.height - 6 if narrow else event.size.height * 9 // 10 - self.AROUND
        self.query_one(SettingsList).styles.max_height = max(height, 1)

    def _tell(self, said: str = "", style: str = "accent") -> None:
        """Show the meaning of the selected setting, and `said` below it."""
        self._detail.show(self._list.chosen, said, style)

    # --- actions ---

    @property
    def _is_editing(self) -> bool:
        return self.has_class("-editing")

    def action_move(self, step: int) -> None:
        if not self._is_editing:
            super().action_move(step)
            self._tell()

    def action_turn(self, step: int) -> None:
        choices = self._list.chosen.choices
        if choices and not self._is_editing:
            now = self._list.chosen.value(self._settings)
            at = choices.index(now) if now in choices else min(-step, 0)  # the value may not be among them
            self._store(choices[(at + step) % len(choices)])

    def action_default(self) -> None:
        if not self._is_editing:
            self._store(None)

    def action_accept(self) -> None:
        known = self._list.chosen
        if self._is_editing:
            self._take(known, self._input.value)
        elif known.choices:
            self.action_turn(1)
        else:
            text = _written(known.value(self._settings))
            if "\n" in text:
                self._tell("It has several lines; edit it with: chatterm config edit", "warning")
                return
            self._input.value = text
            self._edit(True)

    def _take(self, known: KnownSetting, text: str) -> None:
        """Check and store the typed value; an empty text restores the default."""
        try:
            words = _words(known, text)
        except ValueError:
            self._tell("A quotation mark is not closed.", "error")
            return
        value = parsed(known.table, known.name, words) if text.strip() else None
        if value is not None and (problem := problem_with(known.table, known.name, value)):
            self._tell(problem, "error")
            return
        self._edit(False)
        self._store(value)

    def action_back(self) -> None:
        if self._is_editing:
            self._edit(False)
            self._tell()
        else:
            self.dismiss(None)

    def on_settings_list_clicked(self, message: "SettingsList.Clicked") -> None:
        if self._is_editing:
            return
        again = message.row == self._list.row
        self._list.go_to(message.row)
        self._tell()
        if again:
            self.action_accept()

    def _edit(self, on: bool) -> None:
        self.set_class(on, "-editing")
        self.set_focus(self._input if on else None)
        if on:
            self._tell("Enter saves, Esc cancels; an empty line restores the default.", "muted")

    # --- the file ---

    def _store(self, value: Any) -> None:
        known = self._list.chosen
        self.run_worker(self._write(known, value), exclusive=False)

    async def _write(self, known: KnownSetting, value: Any) -> None:
        work = partial(store, self._path, known.table, known.name, value)
        try:
            await asyncio.to_thread(work)
            settings = await asyncio.to_thread(load_settings, self._path)
            self._settings = settings
            self._list.show(settings)
            self._apply(settings, known.table, known.name)
        except EngineError as error:
            self._tell(one_line(str(error)), "error")
            return
        when = "it applies at once" if holds_at_once(known) else "it applies from the next start on"
        self._tell(f"Saved; {when}." if value is not None else f"Reset to the default; {when}.")


def holds_at_once(known: KnownSetting) -> bool:
    return known.table == "sampling" or f"{known.table}.{known.name}" in _AT_ONCE


def _written(value: Any) -> str:
    """Return a value as it would be typed."""
    if isinstance(value, tuple):
        import shlex

        return shlex.join(value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _words(known: KnownSetting, text: str) -> list[str]:
    """Split the typed text if the setting is a list. Raise ValueError for an unclosed quotation mark."""
    if isinstance(known.default, tuple):
        import shlex

        return shlex.split(text)
    return [text.strip()]


class Detail(Canvas):
    """The meaning of the selected setting, and a message."""

    def __init__(self) -> None:
        super().__init__()
        self._known: KnownSetting | None = None
        self._said: Line = []

    def show(self, known: KnownSetting, said: str, style: str) -> None:
        self._known, self._said = known, [(said, style)] if said else []
        self.refresh()

    def build(self, width: int) -> list[Line]:
        known = self._known
        if known is None:
            return []
        when = "Applies at once." if holds_at_once(known) else "Applies from the next start on."
        said = wrap(self._said, width) if self._said else []
        room = max(self.size.height - len(said), 0)
        lines = wrap([(known.doc.replace("`", "") + " ", ""), ("" if said else when, "muted")], width)
        if len(lines) > room > 0:
            lines[room - 1 :] = [[(elided(line_text(lines[room - 1]) + " …", width), "")]]
        return [*lines[:room], *said]


class SettingsList(PickerList):
    """The settings, grouped under the names of their tables."""

    class Clicked(Message):
        def __init__(self, row: int) -> None:
            super().__init__()
            self.row = row

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._rows: list[KnownSetting | str] = []
        for known in known_settings():
            if not self._rows or self._table != known.table:
                self._rows += ([""] if self._rows else []) + [known.table]
            self._table = known.table
            self._rows.append(known)
        self._about = table_docs()
        self._index = 1

    _table = ""

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def row(self) -> int:
        return self._index

    @property
    def chosen(self) -> KnownSetting:
        row = self._rows[self._index]
        assert isinstance(row, KnownSetting)
        return row

    def show(self, settings: Settings) -> None:
        self._settings = settings
        self.refresh()

    def on_mount(self) -> None:
        self.resized()

    def go_to(self, row: int) -> None:
        self._index = row
        self.refresh()

    def move(self, step: int) -> None:
        """Select the setting `step` lines further, or the next one beyond if that line is a heading."""
        way = 1 if step > 0 else -1
        row = min(max(self._index + step, 0), self.count - 1)
        while 0 <= row < self.count and isinstance(self._rows[row], str):
            row += way
        self.go_to(min(max(row, 1), self.count - 1))

    def on_click(self, event: events.Click) -> None:
        row = self.clicked(event)
        if row is not None and isinstance(self._rows[row], KnownSetting):
            event.stop()
            self.post_message(self.Clicked(row))

    def in_view(self) -> range:
        if self._index == 1:  # show the first table's name too
            self._first = 0
            return range(min(max(self.size.height, 1), self.count))
        return super().in_view()

    def build(self, width: int) -> list[Line]:
        return [self._line(row, width) for row in self.in_view()]

    def _line(self, number: int, width: int) -> Line:
        known = self._rows[number]
        if isinstance(known, str):
            about = elided(self._about.get(known, ""), max(width - cells(known) - 2, 1))
            return [(known, "heading"), ("  ", ""), (about, "muted")]
        value = known.value(self._settings)
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else value_text(value)
        column = min(_NAME, width // 2)
        room = width - column - 4
        shown = elided(one_line(text, 300), room)
        style = "muted" if value == known.default else ""
        name = elided(known.name, column - 1)
        line: Line = [
            ("  " if value == known.default else "● ", "accent"),
            (name + " " * (column - cells(name)), ""),
            (shown, style),
        ]
        return styled(padded(line, width, ""), "chosen") if number == self._index else line
