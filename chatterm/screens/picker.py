"""The base of the pickers: a box over the conversation with an input, a list, and the keys to move in it."""

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from chatterm.screens.backdrop import Backdrop
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas

_FEW = 3
"""The fewest lines of a list in the normal layout."""


class Picker(Backdrop, ModalScreen[str | None]):
    """Dismisses with the choice, or with None. A subclass composes a Vertical with an Input and a PickerList."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "back", "Back to the conversation", priority=True),
        Binding("up", "move(-1)", "Up", priority=True),
        Binding("down", "move(1)", "Down", priority=True),
        Binding("pageup", "move(-10)", "Page up", priority=True),
        Binding("pagedown", "move(10)", "Page down", priority=True),
        Binding("enter", "accept", "Select", priority=True),
    ]
    DEFAULT_CSS = """
    Picker { align: center middle; }
    Picker > Vertical { width: 92%; height: auto; max-height: 90%; padding: 1 2; background: $surface; }
    Picker Input, Picker Input:focus {
        border: none; height: 1; padding: 0; margin: 1 0; background: $panel; color: $foreground;
    }
    Picker.-low > Vertical { width: 100%; max-height: 100%; padding: 0 1; }
    Picker.-low Input, Picker.-low Input:focus { margin: 0; }
    """
    AROUND: ClassVar[int]
    """The most lines taken by everything but the list."""
    AROUND_LOW: ClassVar[int] = 3
    """The same in the compact layout, used when the list would have fewer than `_FEW` lines."""

    def on_resize(self, event: events.Resize) -> None:
        # The list scrolls if it does not fit.
        room = event.size.height * 9 // 10 - self.AROUND
        self.set_class(room < _FEW, "-low")
        height = max(event.size.height - self.AROUND_LOW, 1) if room < _FEW else room
        self.query_one(PickerList).styles.max_height = height

    def action_move(self, step: int) -> None:
        self.query_one(PickerList).move(step)

    def action_accept(self) -> None:
        """Take the selected item: Enter."""
        raise NotImplementedError

    def action_back(self) -> None:
        self.dismiss(None)


class PickerList(Canvas):
    """Lines of which one is selected; they scroll to keep it in view."""

    _index = 0
    _first = 0

    @property
    def count(self) -> int:
        """The number of lines."""
        raise NotImplementedError

    def move(self, step: int) -> None:
        """Select the line `step` lines further, at most the first or the last."""
        self._index = min(max(self._index + step, 0), max(self.count - 1, 0))
        self.refresh()

    def resized(self) -> None:
        """Update the height after the number of lines has changed."""
        self.styles.height = max(self.count, 1)
        self.refresh(layout=True)

    def in_view(self) -> range:
        """Return the indices of the lines in view. `count` must be at least 1."""
        height = max(self.size.height, 1)
        first = min(
            self._first, self._index, max(self.count - height, 0)
        )  # no empty rows below the last line
        self._first = max(first, self._index - height + 1)
        return range(self._first, min(self._first + height, self.count))

    def clicked(self, event: events.Click) -> int | None:
        """Return the index of the clicked line; None below the last one."""
        row = self._first + event.y
        return row if row < self.count else None

    def on_mouse_scroll_up(self) -> None:
        self.move(-1)

    def on_mouse_scroll_down(self) -> None:
        self.move(1)
