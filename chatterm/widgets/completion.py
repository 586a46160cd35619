"""The list of commands that opens while `/` is being typed."""

from dataclasses import dataclass

from textual import events
from textual.message import Message

from chatterm.commands import choice_completions, completions
from chatterm.markdown.lines import Line, cells, elided, padded
from chatterm.widgets.canvas import Canvas

_ROWS = 8


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One row: what it shows, and what choosing it puts into the composer."""

    label: str
    help: str
    text: str
    complete: bool
    """Whether `text` can be run as it is."""


def suggestions(text: str) -> list[Suggestion]:
    """What `text` may become."""
    found = [
        Suggestion(c.usage, c.help, f"/{c.name} " if c.arguments else f"/{c.name}", not c.arguments)
        for c in completions(text)
    ]
    return found or [Suggestion(line, "", line, True) for line in choice_completions(text)]


class Completion(Canvas):
    """Opens by itself; Up and Down move, Tab or Enter or a click choose, Esc closes."""

    class Chosen(Message):
        def __init__(self, suggestion: Suggestion) -> None:
            super().__init__()
            self.suggestion = suggestion

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._all: list[Suggestion] = []
        self._index = 0
        self.display = False

    def look(self, text: str) -> None:
        """The composer's text is now `text`."""
        found = suggestions(text)
        if len(found) == 1 and found[0].text == text:
            found = []
        if found != self._all:
            self._all, self._index = found, 0
        self.display = bool(self._all)
        if self._all:
            self.styles.height = min(len(self._all), _ROWS)
            self.refresh()

    def close(self) -> None:
        self._all = []
        self.display = False

    @property
    def chosen(self) -> Suggestion | None:
        return self._all[self._index] if self._all and self.display else None

    def move(self, step: int) -> None:
        self._index = (self._index + step) % len(self._all)
        self.refresh()

    def build(self, width: int) -> list[Line]:
        column = min(max((cells(item.label) for item in self._all), default=0) + 3, width // 2)
        lines: list[Line] = []
        for number, item in list(enumerate(self._all))[self._first : self._first + _ROWS]:
            chosen = "chosen" if number == self._index else ""
            label, text = elided(item.label, column - 2), elided(item.help, width - column - 3)
            line: Line = [
                ("  ", chosen),
                (label.ljust(column), f"primary {chosen}"),
                (text, f"muted {chosen}"),
            ]
            lines.append(padded(line, width, chosen))
        return lines

    @property
    def _first(self) -> int:
        return max(min(self._index - _ROWS // 2, len(self._all) - _ROWS), 0)

    def on_click(self, event: events.Click) -> None:
        row = self._first + event.y
        if row < len(self._all):
            self.post_message(self.Chosen(self._all[row]))
