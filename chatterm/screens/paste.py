"""A view of a pasted text, to read before it is sent."""

from bisect import bisect_right
from itertools import accumulate
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip

from chatterm.markdown.lines import cells
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.report import BoxHead
from chatterm.widgets.canvas import STYLE_CLASSES, Painter


class PasteScreen(Backdrop, ModalScreen[str | None]):
    """Shows a paste. Dismisses with "unfold" or "remove" if the person chose that, else with None."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+o", "dismiss(None)", "Close", priority=True),
        Binding("u,enter", "unfold", "Unfold"),
        Binding("delete,backspace", "dismiss('remove')", "Remove"),
    ]

    def __init__(self, label: str, text: str, *, can_unfold: bool) -> None:
        super().__init__()
        self._label = label
        self._text = text
        self._can_unfold = can_unfold

    def compose(self) -> ComposeResult:
        with Vertical(id="paste"):
            unfold = " · U unfold" if self._can_unfold else ""
            yield BoxHead(self._label, (f"Esc close{unfold} · Del remove", "Esc close"))
            yield PasteView(self._text)

    def action_unfold(self) -> None:
        self.dismiss("unfold" if self._can_unfold else None)


class PasteView(ScrollView, Painter):
    """The wrapped text. Only visible rows are drawn."""

    can_focus = True

    def __init__(self, text: str) -> None:
        super().__init__()
        self._lines = text.split("\n")
        self._steps: list[int] = []
        """By line, the characters per row."""
        self._starts: list[int] = [0]
        """By line, its first row; the last item is the total."""

    def on_mount(self) -> None:
        self.focus()

    def on_resize(self, _: events.Resize) -> None:
        width = max(self.scrollable_content_region.width, 2)
        self._steps = [_step(line, width) for line in self._lines]
        rows = (max(-(-len(line) // step), 1) for line, step in zip(self._lines, self._steps, strict=True))
        self._starts = list(accumulate(rows, initial=0))
        self.virtual_size = Size(width, self._starts[-1])

    def render_line(self, y: int) -> Strip:
        row, base = y + self.scroll_offset.y, self.style_of("")
        number = bisect_right(self._starts, row) - 1
        if number >= len(self._steps):
            return Strip.blank(self.size.width, base)
        step = self._steps[number]
        start = (row - self._starts[number]) * step
        text = self._lines[number][start : start + step].expandtabs(4)
        return self.strip([(text, "")]).crop_extend(0, self.size.width, base)


def _step(line: str, width: int) -> int:
    """Return how many characters of `line` always fit into a row of `width` columns."""
    if len(line) * 2 <= width or (line.isascii() and "\t" not in line):
        return width
    return width if cells(line.expandtabs(4)) == len(line) else width // (4 if "\t" in line else 2)
