"""The model picker: what is on this machine and in the catalogue, with sizes and whether it fits."""

from collections.abc import Sequence
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input

from chatterm.backend import ModelChoice
from chatterm.markdown.lines import Line, cells, elided, padded, styled
from chatterm.sanitize import one_line
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas
from models.units import bytes_text

_PLACE = 16
"""Columns of "on this machine"."""
_SIZE = 9
_FITS = 14


class ModelPicker(ModalScreen[str | None]):
    """Dismisses with the chosen name, or with None. What is typed filters the list; a name that is in no list
    (a Hub id, a path) can be typed too."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "close", "Back to the conversation", priority=True),
        Binding("up", "move(-1)", "Up", priority=True),
        Binding("down", "move(1)", "Down", priority=True),
        Binding("pageup", "move(-10)", "Page up", priority=True),
        Binding("pagedown", "move(10)", "Page down", priority=True),
        Binding("enter", "choose", "Take it", priority=True),
    ]
    DEFAULT_CSS = """
    ModelPicker { align: center middle; background: $background 70%; }
    ModelPicker > Vertical {
        width: 92%; max-width: 96; height: auto; max-height: 90%; padding: 1 2; background: $surface;
    }
    ModelPicker Input, ModelPicker Input:focus {
        border: none; height: 1; padding: 0; margin: 1 0; background: $panel; color: $foreground;
    }
    ModelPicker PickerLine { height: 1; }
    ModelPicker #picker-foot { margin-top: 1; }
    """

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

    def on_resize(self, event: events.Resize) -> None:
        # All but the list takes 8 lines; what does not fit is scrolled to.
        self._list.styles.max_height = max(event.size.height * 9 // 10 - 8, 1)

    @property
    def _list(self) -> "ModelList":
        return self.query_one(ModelList)

    @on(Input.Changed)
    def _typed(self, message: Input.Changed) -> None:
        self._list.look(message.value)

    def on_model_list_chosen(self, message: "ModelList.Chosen") -> None:
        self.dismiss(message.name)

    def action_move(self, step: int) -> None:
        self._list.move(step)

    def action_choose(self) -> None:
        if (name := self._list.chosen) is not None:
            self.dismiss(name)

    def action_close(self) -> None:
        self.dismiss(None)


class PickerLine(Canvas):
    """One fixed line."""

    def __init__(self, line: Line, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._line = line

    def build(self, width: int) -> list[Line]:
        return [self._line]


class ModelList(Canvas):
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
        self._first = 0

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
        self._resized()

    def move(self, step: int) -> None:
        """Choose another, `step` lines further."""
        self._index = min(max(self._index + step, 0), max(len(self._matching) - 1, 0))
        self.refresh()

    def on_mount(self) -> None:
        self._resized()

    def _resized(self) -> None:
        self.styles.height = max(len(self._matching), 1)
        self.refresh(layout=True)

    def on_click(self, event: events.Click) -> None:
        row = self._first + event.y
        if row < len(self._matching):
            event.stop()
            self.post_message(self.Chosen(self._matching[row].name))

    def build(self, width: int) -> list[Line]:
        if not self._matching:
            typed = elided(self._typed, width - 20)
            return [[("Nothing matches; ", "muted"), ("Enter takes ", "muted"), (typed, "primary")]]
        height = max(self.size.height, 1)
        self._first = min(max(self._first, self._index - height + 1), self._index)
        shown = self._matching[self._first : self._first + height]
        return [
            choice_line(choice, width, chosen=self._first + row == self._index, current=self._current)
            for row, choice in enumerate(shown)
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
