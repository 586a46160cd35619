"""The line in which one types what to find in the conversation."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input

from chatterm.markdown.lines import Line, cells
from chatterm.widgets.canvas import Canvas


class FindBar(Horizontal):
    """Shown while something is being looked for."""

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
        """There is another text to find."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Stepped(Message):
        """The next match (1) or the one before (-1) is wanted."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Find in this conversation", select_on_focus=False)
        yield FindCount()

    def open(self, text: str) -> None:
        """Take the focus, with this text."""
        self.display = True
        box = self.query_one(Input)
        box.value, box.cursor_position = text, len(text)
        box.focus()

    def say(self, text: str) -> None:
        """How many there are."""
        self.query_one(FindCount).show(text)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Typed(event.value))

    def action_step(self, step: int) -> None:
        self.post_message(self.Stepped(step))


class FindCount(Canvas):
    """How many matches there are, and what the keys do."""

    _text = ""

    def show(self, text: str) -> None:
        self._text = text
        self.styles.width = cells(text)
        self.refresh(layout=True)

    def build(self, width: int) -> list[Line]:
        return [[(self._text, "muted")]]
