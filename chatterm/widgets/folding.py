"""A text area that shows long pastes as labels."""

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
"""Longer texts can be sent but are shown as one label, because laying them out would take too long."""
_PIECE = 1 << 16
"""Characters cleaned at a time; the screen gets its turn in between."""
_LINE_END = re.compile(r"\r\n|\r|\n")


class FoldingArea(TextArea):
    """A text area with labels: the cursor skips them, they are deleted whole, and a click or Ctrl+O opens them."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"composer--label"}
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+o", "open_paste", "View paste", show=False)]

    class PasteOpened(Message):
        """Posted to show a paste. `done` is called with what to do then: "unfold", "remove" or None."""

        def __init__(
            self, label: str, text: str, can_unfold: bool, done: Callable[[str | None], None]
        ) -> None:
            super().__init__()
            self.label = label
            self.text = text
            self.can_unfold = can_unfold
            self.done = done

    def __init__(self, *, placeholder: str, id: str | None = None) -> None:
        self.pastes = Pastes()  # set first: the base class looks for labels while it is created
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
        """The text with every label replaced by its paste."""
        return self.pastes.unfold(self.text)

    def put(self, text: str) -> None:
        """Replace the text, with the cursor at the end. Fold a very long text."""
        if not text:
            self.pastes.clear()
        elif is_long(text, _MOST_LINES, _MOST_CHARACTERS):
            text = self.pastes.fold(text)
        self.load_text(text)
        self.move_cursor(self.document.end)

    def marked(self, row: int) -> list[tuple[int, int]]:
        """Return the spans of line `row` to show in the colour of labels."""
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
        """Show the paste at the cursor, else the last one."""
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
        """Return the spans of the labels in line `row`; none if there is no such line."""
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
        """Move a selection's ends out of labels, so that nothing is typed inside one."""
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
        """Apply any edit, clamped to the text and extended to whole labels."""
        start, end = self._whole(edit.top, edit.bottom)
        return super().edit(replace(edit, from_location=start, to_location=end))

    def _whole(self, start: Location, end: Location) -> tuple[Location, Location]:
        """Return the range from `start` to `end`, extended to whole labels."""
        top, bottom = self._inside(start), self._inside(end)
        for first, last in self._labels(top[0]) if top != bottom else ():
            if first < top[1] < last:
                top = top[0], first
        for first, last in self._labels(bottom[0]) if top != bottom else ():
            if first < bottom[1] < last:
                bottom = bottom[0], last
        return top, bottom

    def _inside(self, place: Location) -> Location:
        """Return `place` clamped to the text: Textual deletes to the start of the next line, even on the last one."""
        row, column = place
        if row < 0:
            return 0, 0
        if row >= self.document.line_count:
            return self.document.end
        return row, min(max(column, 0), len(self._line(row)))

    def undo(self) -> None:
        if self.history.undo_stack:
            # Textual reads the cursor's line after that line was removed.
            self.move_cursor((0, 0))
            super().undo()

    def redo(self) -> None:
        if self.history.redo_stack:
            self.move_cursor((0, 0))
            super().redo()


def _pieces(text: str) -> Iterator[str]:
    """Yield `text` in pieces of at least `_PIECE` characters, each but the last ending at a line end."""
    start = 0
    while start < len(text):
        match = _LINE_END.search(text, start + _PIECE)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end
