"""The model picker: what is on this machine and in the catalogue, with sizes and whether it fits."""

from collections.abc import Sequence

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from chatterm.backend import ModelChoice
from chatterm.markdown.lines import Line, cells, elided, padded, styled
from chatterm.sanitize import one_line
from chatterm.screens.picker import Picker, PickerList
from chatterm.widgets.canvas import Canvas
from models.units import bytes_text

_PLACE = 16
"""Columns of "on this machine"."""
_SIZE = 9
_FITS = 14


class ModelPicker(Picker):
    """Dismisses with the chosen name, or with None. What is typed filters the list; a name that is in no list
    (a Hub id, a path) can be typed too."""

    DEFAULT_CSS = """
    ModelPicker > Vertical { max-width: 96; }
    ModelPicker PickerLine { height: 1; }
    ModelPicker #picker-foot { margin-top: 1; }
    """
    AROUND = 8

    def __init__(self, choices: Sequence[ModelChoice], current: str = "") -> None:
        super().__init__()
        self._choices = list(choices)
        self._current = current

    def compose(self) -> ComposeResult:
        with Vertical():
            yield PickerLine([("Models", "heading")])
            yield Input(placeholder="Type to search, or a Hub id or a path")
            yield ModelList(self._choices, self._current)
            foot = "Enter takes it, and downloads what is missing · Esc goes back"
            yield PickerLine([(foot, "muted")], id="picker-foot")

    @property
    def _list(self) -> "ModelList":
        return self.query_one(ModelList)

    @on(Input.Changed)
    def _typed(self, message: Input.Changed) -> None:
        self._list.look(message.value)

    def on_model_list_chosen(self, message: "ModelList.Chosen") -> None:
        self.dismiss(message.name)

    def action_accept(self) -> None:
        if (name := self._list.chosen) is not None:
            self.dismiss(name)


class PickerLine(Canvas):
    """One fixed line."""

    def __init__(self, line: Line, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._line = line

    def build(self, width: int) -> list[Line]:
        return [self._line]


class ModelList(PickerList):
    """The choices that match, one a line, one of them chosen."""

    class Chosen(Message):
        """A choice was clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, choices: Sequence[ModelChoice], current: str) -> None:
        super().__init__()
        self._choices = choices
        self._current = current
        self._typed = ""
        self._matching = list(choices)
        names = [choice.name for choice in choices]
        self._index = names.index(current) if current in names else 0

    @property
    def count(self) -> int:
        return len(self._matching)

    @property
    def chosen(self) -> str | None:
        """The name to take: the chosen one of the list, else what was typed; None while there is neither."""
        if self._matching:
            return self._matching[self._index].name
        return self._typed or None

    def look(self, typed: str) -> None:
        """Show what matches `typed`."""
        self._typed = one_line(typed, 300)
        words = self._typed.lower().split()
        self._matching = [c for c in self._choices if all(word in c.name.lower() for word in words)]
        self._index = self._first = 0
        self.resized()

    def on_mount(self) -> None:
        self.resized()

    def on_click(self, event: events.Click) -> None:
        row = self.clicked(event)
        if row is not None:
            event.stop()
            self.post_message(self.Chosen(self._matching[row].name))

    def build(self, width: int) -> list[Line]:
        if not self._matching:
            typed = elided(self._typed, width - 20)
            return [[("Nothing matches; ", "muted"), ("Enter takes ", "muted"), (typed, "primary")]]
        return [
            choice_line(self._matching[row], width, chosen=row == self._index, current=self._current)
            for row in self.in_view()
        ]


def choice_line(choice: ModelChoice, width: int, *, chosen: bool, current: str = "") -> Line:
    """A mark, the name, the size, where it is, whether it fits; on narrow screens the last ones are left out."""
    mark = "● " if choice.name == current else "○ " if choice.on_disk else "  "
    fits = {True: "fits", False: "does not fit", None: ""}[choice.fits]
    columns = [
        (bytes_text(choice.bytes) if choice.bytes else "?", _SIZE, "", True),
        (
            "on this machine" if choice.on_disk else "to download",
            _PLACE,
            "" if choice.on_disk else "muted",
            False,
        ),
        (fits, _FITS, "warning" if choice.fits is False else "muted", False),
    ]
    while columns and width - 2 - sum(size + 2 for _, size, _, _ in columns) < 18:
        columns.pop(1 if len(columns) > 2 else -1)
    room = max(width - 2 - sum(size + 2 for _, size, _, _ in columns), 4)
    name = elided(one_line(choice.name, 200), room)
    line: Line = [
        (mark, "primary"),
        (name, "muted" if choice.fits is False else ""),
        (" " * (room - cells(name)), ""),
    ]
    for text, size, style, right in columns:
        text = elided(text, size)
        gap = " " * (size - cells(text))
        line += [("  ", ""), (gap, ""), (text, style)] if right else [("  ", ""), (text, style), (gap, "")]
    return styled(padded(line, width, ""), "chosen") if chosen else line
