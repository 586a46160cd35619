"""The input line for a search in the conversation."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input

from chatterm.markdown.lines import Line, cells
from chatterm.widgets.canvas import Canvas


class FindBar(Horizontal):
    """The search input and the number of matches; shown while a search is open."""

    DEFAULT_CSS = """
    FindBar { height: 1; margin: 1 2 0 2; background: $panel; display: none; }
    FindBar Input, FindBar Input:focus {
        width: 1fr; border: none; height: 1; padding: 0 1 0 2; background: $panel; color: $foreground;
    }
    FindBar FindCount { height: 1; background: $panel; margin-right: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,down,ctrl+n,f3", "step(1)", "Next", priority=True),
        Binding("shift+enter,up,ctrl+p,shift+f3", "step(-1)", "Previous", priority=True),
    ]

    class Typed(Message):
        """Posted when the search text changes."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Stepped(Message):
        """Posted to go to the next match (1) or the previous one (-1)."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Find in this conversation", select_on_focus=False)
        yield FindCount()

    def open(self, text: str) -> None:
        """Show the bar with this text and focus it."""
        self.display = True
        box = self.query_one(Input)
        box.value, box.cursor_position = text, len(text)
        box.focus()

    def say(self, text: str) -> None:
        """Show `text`, such as the number of matches, at the end of the bar."""
        self.query_one(FindCount).show(text)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Typed(event.value))

    def action_step(self, step: int) -> None:
        self.post_message(self.Stepped(step))


class FindCount(Canvas):
    """The number of matches and a hint about the keys."""

    _text = ""

    def show(self, text: str) -> None:
        self._text = text
        self.styles.width = cells(text)
        self.refresh(layout=True)

    def build(self, width: int) -> list[Line]:
        return [[(self._text, "muted")]]
