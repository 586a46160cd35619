"""A yes-or-no question over the conversation, before something that cannot be undone."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from chatterm.markdown.lines import Line
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.notes import Note
from chatterm.widgets.canvas import STYLE_CLASSES


class QuestionScreen(Backdrop, ModalScreen[bool]):
    """Dismisses with the answer. Only y means yes: an Enter may have been meant for the screen below."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes", priority=True),
        Binding("n,escape,ctrl+c", "dismiss(False)", "No", priority=True),
    ]
    DEFAULT_CSS = """
    QuestionScreen { align: center bottom; }
    QuestionScreen > Vertical {
        width: 100%; max-width: 140; height: auto; max-height: 100%; padding: 1 2; background: $surface;
        color: $foreground; border-top: heavy $accent;
    }
    """

    def __init__(self, question: str, yes: str, no: str) -> None:
        """Ask `question`; `yes` and `no` tell what each answer does, such as "stops it"."""
        super().__init__()
        keys: Line = [("y", "accent"), (f" {yes} · ", "muted"), ("n", "accent"), (f" {no}", "muted")]
        self._text = Note([(question, "strong"), ("\n", ""), *keys])

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self._text
