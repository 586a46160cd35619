"""A text to read over the conversation: help, statistics, the effect of the cache, the system prompt."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip

from chatterm.commands.registry import COMMANDS
from chatterm.markdown.lines import Line, cells, elided
from chatterm.screens.backdrop import Backdrop
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas, Painter
from chatterm.widgets.slices import in_slices

_NARROW = 60
"""Columns below which a report takes the whole screen."""
_AT_ONCE = 200
"""Lines built before a report is shown, more than a screen has; the others follow in a moment."""
_OTHERS = ("help", "stats", "cache", "set", "settings", "theme", "model", "sessions")
"""Commands whose keys work here too: they replace the report."""


class ReportScreen(Backdrop, ModalScreen[str | None]):
    """Dismisses with None, or with the name of the command to run instead, whose key was pressed."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,ctrl+c", "dismiss(None)", "Back to the conversation", priority=True)
    ]
    DEFAULT_CSS = """
    ReportScreen { align: center middle; }
    ReportScreen > Vertical {
        width: 92%; max-width: 116; height: auto; padding: 1 2; background: $surface; color: $foreground;
    }
    ReportScreen.-narrow > Vertical { width: 100%; height: 100%; padding: 0 1; }
    """

    def __init__(self, name: str, title: str, builder: Callable[[int], Iterable[Line]]) -> None:
        """Show the report of the command `name`, whose key closes it. `builder` returns the lines for a width."""
        super().__init__()
        self._command = name
        self._title = title
        self._builder = builder

    def compose(self) -> ComposeResult:
        with Vertical():
            yield BoxHead(self._title, ("↑ ↓ scroll · Esc closes", "Esc closes"))
            yield ReportView(self._builder)

    def on_resize(self, event: events.Resize) -> None:
        narrow = event.size.width < _NARROW
        self.set_class(narrow, "-narrow")
        most = event.size.height - 2 if narrow else event.size.height * 9 // 10 - 4
        self.query_one(ReportView).styles.max_height = max(most, 1)

    def on_key(self, event: events.Key) -> None:
        others = (command for command in COMMANDS if command.name in _OTHERS)
        name = next((other.name for other in others if other.keys.get(event.key) == ""), None)
        if name is not None:
            event.stop()
            self.dismiss(None if name == self._command else name)

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.dismiss(None)


class BoxHead(Canvas):
    """The head of a box: its label, the first of `keys` that fits, and a rule."""

    DEFAULT_CSS = "BoxHead { height: 2; }"

    def __init__(self, label: str, keys: Sequence[str]) -> None:
        super().__init__()
        self._label = label
        self._keys = keys

    def build(self, width: int) -> list[Line]:
        room = width - cells(self._label) - 2
        keys = next((keys for keys in self._keys if cells(keys) <= room), "")
        label = elided(self._label, width - cells(keys) - (2 if keys else 0))
        gap = " " * (width - cells(label) - cells(keys))
        return [[(label, "strong primary"), (gap, ""), (keys, "muted")], [("─" * width, "rule")]]


class ReportView(ScrollView, Painter, can_focus=True):
    """A scrollable view of the lines."""

    DEFAULT_CSS = """
    ReportView {
        overflow: hidden auto; scrollbar-gutter: stable; scrollbar-size-vertical: 1;
        scrollbar-background: $surface; scrollbar-background-hover: $surface; scrollbar-background-active: $surface;
        scrollbar-color: $faint; scrollbar-color-hover: $muted; scrollbar-color-active: $muted;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("space", "page_down", show=False),
        Binding("b", "page_up", show=False),
    ]

    def __init__(self, builder: Callable[[int], Iterable[Line]]) -> None:
        super().__init__()
        self._builder = builder
        self._lines: list[Line] = []
        self._made_for = 0

    def on_mount(self) -> None:
        self.focus()

    def on_resize(self, _: events.Resize) -> None:
        width = max(self.scrollable_content_region.width - 1, 8)  # a column of air before the bar
        if width != self._made_for:
            lines = iter(self._builder(width))
            self._made_for, self._lines = width, list(islice(lines, _AT_ONCE))
            self.run_worker(in_slices(self._take(lines), between=self._fit), exclusive=True)
        self._fit()

    def _take(self, lines: Iterator[Line]) -> Generator[None, None, None]:
        """Build the remaining lines; yield after each."""
        for line in lines:
            self._lines.append(line)
            yield
        self._fit()

    def _fit(self) -> None:
        """Set the height to the number of lines."""
        self.styles.height = max(len(self._lines), 1)
        self.virtual_size = Size(self._made_for, len(self._lines))

    def render_line(self, y: int) -> Strip:
        row = y + self.scroll_offset.y
        line = self._lines[row] if row < len(self._lines) else []
        return self.strip(line).crop_extend(0, self.size.width, self.style_of(""))
