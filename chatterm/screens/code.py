"""Choosing a code block of an answer, and saving it. Only a second Enter overwrites a file."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widgets import Input

from chatterm.markdown.code import CodeBlock
from chatterm.markdown.lines import Line, elided, padded, styled, wrap
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.picker import PickerList
from chatterm.screens.report import BoxHead
from chatterm.terminal.sanitize import one_line, visible
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas
from models.files import write_whole
from models.units import counted

_SHOWN = 6
"""The most lines of a block that are shown."""
_KIND = 10
"""Columns of a block's language."""


class ChooseCodeScreen(Backdrop, ModalScreen[CodeBlock | None]):
    """Dismisses with the chosen block, or with None."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss(None)", "Back", priority=True),
        Binding("up", "step(-1)", "Earlier block", priority=True),
        Binding("down", "step(1)", "Later block", priority=True),
        Binding("enter", "choose", "This one", priority=True),
        *(Binding(str(n), f"number({n})", f"Block {n}", show=False, priority=True) for n in range(1, 10)),
    ]
    DEFAULT_CSS = """
    ChooseCodeScreen { align: center bottom; }
    ChooseCodeScreen > Vertical {
        width: 100%; max-width: 140; height: auto; max-height: 100%; padding: 1 2; background: $surface;
        color: $foreground; border-top: heavy $accent;
    }
    ChooseCodeScreen BlockView { height: auto; margin-top: 1; }
    """

    def __init__(self, title: str, blocks: Sequence[CodeBlock]) -> None:
        """Show the blocks; the last one is selected at first."""
        super().__init__()
        self._title = title
        self._blocks = blocks
        self._view = BlockView(blocks)
        self._list = BlockList(blocks)

    def compose(self) -> ComposeResult:
        digits = f"1 to {min(len(self._blocks), 9)} takes one"
        with Vertical():
            yield BoxHead(
                self._title, (f"{digits} · ↑ ↓ and Enter, too · Esc back", f"{digits} · Esc back", digits)
            )
            yield self._list
            yield self._view

    def action_step(self, step: int) -> None:
        self._view.step(step)
        self._list.move(step)

    def action_number(self, number: int) -> None:
        if number <= len(self._blocks):
            self.dismiss(self._blocks[number - 1])

    def action_choose(self) -> None:
        self.dismiss(self._view.block)


class SaveCodeScreen(Backdrop, ModalScreen[Path | None]):
    """Dismisses with the path of the file written, or with None."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "dismiss(None)", "Back", priority=True)]
    DEFAULT_CSS = """
    SaveCodeScreen { align: center bottom; }
    SaveCodeScreen > Vertical {
        width: 100%; max-width: 140; height: auto; max-height: 100%; padding: 1 2; background: $surface;
        color: $foreground; border-top: heavy $accent;
    }
    SaveCodeScreen Input, SaveCodeScreen Input:focus {
        border: none; height: 1; padding: 0 1; margin-top: 1; background: $panel; color: $foreground;
    }
    SaveCodeScreen BlockView { height: auto; }
    """

    def __init__(self, block: CodeBlock) -> None:
        super().__init__()
        self._view = BlockView([block])
        self._over: Path | None = None
        """The existing file that another Enter overwrites."""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield BoxHead("Save a code block", ("Enter saves · Esc back", "Esc back"))
            yield self._view
            yield Input(placeholder="Name of the file", select_on_focus=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_changed(self) -> None:
        self._over = None
        self._view.say("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if not text:
            return self._view.say("Write a name, or press Esc.")
        try:
            path = Path(text).expanduser().absolute()
            if path.exists() and self._over != path:
                if not path.is_file():
                    return self._view.say(
                        "That name is taken by something that is not a file; write another name."
                    )
                self._over = path
                return self._view.say("That file exists; Enter overwrites it. Or write another name.")
            text = self._view.block.text + "\n"
            if self._over == path:
                if not os.access(path, os.W_OK):  # `write_whole` would replace it all the same
                    raise PermissionError(errno.EACCES, "the file is write-protected")
                write_whole(path, text, errors="replace", parents=False)
            else:
                with path.open("x", encoding="utf-8", errors="replace") as file:
                    file.write(text)
        except (OSError, ValueError, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            return self._view.say(f"It cannot be saved there: {one_line(why or str(error), 200)}.")
        self.dismiss(path)
        return None


class BlockList(PickerList):
    """The blocks, one a line, each with the digit that chooses it; the last one is selected at first."""

    DEFAULT_CSS = "BlockList { max-height: 9; }"

    def __init__(self, blocks: Sequence[CodeBlock]) -> None:
        super().__init__()
        self._blocks = blocks
        self._index = len(blocks) - 1

    @property
    def count(self) -> int:
        return len(self._blocks)

    def on_mount(self) -> None:
        self.resized()

    def build(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for row in self.in_view():
            block = self._blocks[row]
            digit = str(row + 1) if row < 9 else " "
            kind = elided(one_line(block.language, 40) or "text", _KIND)
            begins = next((text for text in block.text.split("\n") if text.strip()), "")
            shown = elided(one_line(begins, 300), max(width - _KIND - 6, 1))
            line: Line = [(f" {digit} ", "accent"), (kind.ljust(_KIND + 2), "muted"), (shown, "")]
            lines.append(styled(padded(line, width, ""), "chosen") if row == self._index else line)
        return lines


class BlockView(Canvas):
    """The beginning of the selected block, and a message below."""

    def __init__(self, blocks: Sequence[CodeBlock]) -> None:
        super().__init__()
        self._blocks = blocks
        self._index = len(blocks) - 1
        self._said = ""

    @property
    def block(self) -> CodeBlock:
        return self._blocks[self._index]

    def step(self, step: int) -> None:
        self._index = min(max(self._index + step, 0), len(self._blocks) - 1)
        self.refresh(layout=True)

    def say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.refresh(layout=True)

    def build(self, width: int) -> list[Line]:
        rows = visible(self.block.text).split("\n")
        which = f"Block {self._index + 1} of {len(self._blocks)}, {counted(len(rows), 'line')}"
        lines: list[Line] = [[(elided(which, width), "muted")]]
        lines += [
            [("│ ", "rule"), (elided(row.expandtabs(4), max(width - 2, 1)), "")] for row in rows[:_SHOWN]
        ]
        if len(rows) > _SHOWN:
            lines.append([("│ …", "rule")])
        return [*lines, *(wrap([(self._said, "warning")], max(width, 10)) if self._said else [])]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width))
