"""The texts around the list of a picker, and its clickable actions."""

from textual import events
from textual.geometry import Size
from textual.message import Message

from chatterm.markdown.lines import Line, cells, elided, wrap
from chatterm.widgets.canvas import Canvas


class Note(Canvas):
    """A wrapped text; without a fixed height it is as high as its lines."""

    DEFAULT_CSS = "Note { height: auto; }"

    def __init__(self, runs: Line | None = None, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._runs = runs or []

    def show(self, runs: Line) -> None:
        self._runs = runs
        self.refresh(layout=True)

    def build(self, width: int) -> list[Line]:
        return wrap(self._runs, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width))


class Choices(Note):
    """Clickable actions, separated by dots where they share a line."""

    class ActionSelected(Message):
        """Posted when an action was clicked."""

        def __init__(self, action: str) -> None:
            super().__init__()
            self.action = action

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._parts: tuple[tuple[str, str], ...] = ()

    def offer(self, *parts: tuple[str, str]) -> None:
        """Show these (text, action) pairs; the action is "" for a mere text."""
        self._parts = parts
        self.refresh(layout=True)

    def _rows(self, width: int) -> list[list[tuple[int, str, str]]]:
        """Return the lines as lists of (column, text, action)."""
        rows: list[list[tuple[int, str, str]]] = [[]]
        column = 0
        for text, action in self._parts:
            if rows[-1] and column + 3 + cells(text) > width:
                rows.append([])
            column = column + 3 if rows[-1] else 0
            rows[-1].append((column, elided(text, width), action))
            column += cells(text)
        return rows

    def build(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for row in self._rows(width):
            lines.append([])
            for _, text, action in row:
                lines[-1] += [(" · ", "muted")] if lines[-1] else []
                lines[-1].append((text, "muted" if action else "warning"))
        return lines

    def on_click(self, event: events.Click) -> None:
        rows = self._rows(self.size.width)
        for column, text, action in rows[event.y] if event.y < len(rows) else ():
            if action and column <= event.x < column + cells(text):
                event.stop()
                self.post_message(self.ActionSelected(action))
