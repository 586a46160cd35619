"""A text area in which long pastes stand as labels."""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.document._document import EditResult, Location, Selection
from textual.document._edit import Edit
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea

from chatterm.terminal.sanitize import cleaned
from chatterm.widgets.paste import Pastes, is_long

_MOST_LINES, _MOST_CHARACTERS = 1000, 50_000
"""What is longer can be written and sent, but stands as one label here: laying it out would take a while."""
_PIECE = 1 << 16
"""Characters that are cleaned at once; in between the screen goes on."""
_LINE_END = re.compile(r"\r\n|\r|\n")


class FoldingArea(TextArea):
    """A label is plain text that the cursor jumps over and that goes as a whole; a click or Ctrl+O opens it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"composer--label"}
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+o", "open_paste", "View paste", show=False)]

    class PasteOpened(Message):
        """The person wants to see a paste. `done` takes "unfold", "remove" or None: what is to become of it."""

        def __init__(
            self, label: str, text: str, can_unfold: bool, done: Callable[[str | None], None]
        ) -> None:
            super().__init__()
            self.label = label
            self.text = text
            self.can_unfold = can_unfold
            self.done = done

    def __init__(self, *, placeholder: str, id: str | None = None) -> None:
        self.pastes = Pastes()  # first: the text area asks where labels stand as soon as it is made
        super().__init__(
            id=id,
            soft_wrap=True,
            compact=True,
            highlight_cursor_line=False,
            tab_behavior="focus",
            placeholder=placeholder,
        )

    @property
    def full_text(self) -> str:
        """The text with every paste in its place."""
        return self.pastes.unfold(self.text)

    def put(self, text: str) -> None:
        """Show `text` with the cursor at its end. A very long text is folded."""
        if not text:
            self.pastes.clear()
        elif is_long(text, _MOST_LINES, _MOST_CHARACTERS):
            text = self.pastes.fold(text)
        self.load_text(text)
        self.move_cursor(self.document.end)

    def marked(self, row: int) -> list[tuple[int, int]]:
        """What of line `row` is shown in the colour of labels."""
        return self._labels(row)

    def get_line(self, line_index: int) -> Text:
        text = super().get_line(line_index)
        if spans := self.marked(line_index):
            style = self.get_component_rich_style("composer--label", partial=True)
            for span in spans:
                text.stylize(style, *span)
        return text

    def render_line(self, y: int) -> Strip:
        if self.content_size.width < 1:  # Textual cannot wrap the placeholder then
            return Strip.blank(self.size.width)
        return super().render_line(y)

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if self.read_only:
            return
        pieces = []
        for piece in _pieces(event.text):
            pieces.append(cleaned(piece))
            await asyncio.sleep(0)
        text = "".join(pieces)
        if is_long(text):
            text = self.pastes.fold(text)
        if text and (result := self._replace_via_keyboard(text, *self.selection)):
            self.move_cursor(result.end_location)

    def action_open_paste(self) -> None:
        """Look at the paste at the cursor, or at the last one."""
        row, column = self.cursor_location
        spans = self._labels(row)
        here = [span for span in spans if span[0] <= column <= span[1]]
        if here:
            self._open(row, here[0])
            return
        for number in reversed(range(self.document.line_count)):
            if spans := self._labels(number):
                self._open(number, spans[-1])
                return

    def _open(self, row: int, span: tuple[int, int]) -> None:
        label = self._line(row)[slice(*span)]
        text = self.pastes.text_of(label)
        short = not is_long(text, _MOST_LINES, _MOST_CHARACTERS)

        def done(answer: str | None) -> None:
            if answer in ("unfold", "remove") and self._line(row)[slice(*span)] == label:
                insert = text if answer == "unfold" else ""
                result = self.replace(insert, (row, span[0]), (row, span[1]), maintain_selection_offset=False)
                self.move_cursor(result.end_location)

        self.post_message(self.PasteOpened(label, text, short, done))

    def _labels(self, row: int) -> list[tuple[int, int]]:
        """Where labels stand in line `row`; none where there is no such line."""
        return self.pastes.spans(self._line(row))

    def _line(self, row: int) -> str:
        return self.document.get_line(row) if 0 <= row < self.document.line_count else ""

    def on_click(self, event: events.Click) -> None:
        row, column = self.get_target_document_location(event)
        for span in self._labels(row):
            if span[0] <= column < span[1]:
                self._open(row, span)
                return

    def validate_selection(self, selection: Selection) -> Selection:
        """The cursor jumps over a label: nothing is written inside of one."""
        start, end = selection
        before = self.selection.end
        return Selection(self._outside(start, before), self._outside(end, before))

    def _outside(self, place: Location, before: Location) -> Location:
        row, column = place
        for first, last in self._labels(row):
            if first < column < last:
                middle = before[1] if before[0] == row and before != place else (first + last) // 2
                return row, last if middle < column else first
        return place

    def edit(self, edit: Edit) -> EditResult:
        """Every change comes through here: it stays inside of the text and takes labels whole."""
        start, end = self._whole(edit.top, edit.bottom)
        return super().edit(replace(edit, from_location=start, to_location=end))

    def _whole(self, start: Location, end: Location) -> tuple[Location, Location]:
        """From `start` to `end`, with the whole of every label that this cuts."""
        top, bottom = self._inside(start), self._inside(end)
        for first, last in self._labels(top[0]) if top != bottom else ():
            if first < top[1] < last:
                top = top[0], first
        for first, last in self._labels(bottom[0]) if top != bottom else ():
            if first < bottom[1] < last:
                bottom = bottom[0], last
        return top, bottom

    def _inside(self, place: Location) -> Location:
        """The nearest place of the text. Textual deletes a line up to the start of the next, even of the last one."""
        row, column = place
        if row < 0:
            return 0, 0
        if row >= self.document.line_count:
            return self.document.end
        return row, min(max(column, 0), len(self._line(row)))

    def undo(self) -> None:
        if self.history.undo_stack:
            # Textual looks where the cursor is while the line that it was on is gone already.
            self.move_cursor((0, 0))
            super().undo()

    def redo(self) -> None:
        if self.history.redo_stack:
            self.move_cursor((0, 0))
            super().redo()


def _pieces(text: str) -> Iterator[str]:
    """`text` in parts of some length that end where a line does."""
    start = 0
    while start < len(text):
        match = _LINE_END.search(text, start + _PIECE)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end
