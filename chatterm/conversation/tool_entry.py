"""Tool calls in a transcript: one line each, with the result folded below."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.conversation.entries import INDENT, Click, Entry, Section, UserEntry
from chatterm.conversation.figures import seconds_text
from chatterm.markdown.lines import Line, cells, elided, wrap
from chatterm.sessions.tool_calls_json import results_text
from chatterm.terminal.sanitize import cleaned, one_line, visible
from chatterm.tools.arguments import parsed
from chatterm.tools.arguments import show_arguments as arguments_shown
from chatterm.tools.tool import ToolError

_MOST_LINES = 400
"""Most lines of a result that are shown when it is open."""
_TAIL = 5
"""Last lines of running output that are shown."""
_BARS: Line = [(" " * INDENT, ""), ("│ ", "rule")]
_STYLES = {"failed": "warning", "refused": "warning", "stopped": "warning", "asking": "accent"}
_WORDS = {"asking": "waits for you", "running": "running", "waiting": "waits"}


@dataclass(slots=True)
class CallView:
    """The current state of a call."""

    name: str
    arguments: str
    state: str = "waiting"
    """The state of a result; or waiting, asking, running."""
    seconds: float = 0.0
    text: str = ""
    is_open: bool = False


class ToolsEntry(UserEntry):
    """The tool calls of the previous answer and their results, in place of a user message."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        super().__init__("")
        self.calls = [CallView(call.name, call.arguments) for call in calls]
        self._heads: list[int] = []
        """The rows at which calls begin."""

    @classmethod
    def of(cls, results: Sequence[ToolResult]) -> "ToolsEntry":
        """Make an entry of finished calls."""
        entry = cls([ToolCall(result.name, result.arguments) for result in results])
        for shown, result in zip(entry.calls, results, strict=True):
            shown.state, shown.seconds, shown.text = result.state, result.seconds, result.text
        entry.text = cleaned(results_text(results))
        return entry

    def show_state(self, number: int, state: str, seconds: float = 0.0, text: str | None = None) -> None:
        """Show the state of call `number`."""
        shown = self.calls[number]
        shown.state, shown.seconds = state, seconds
        if text is not None:
            shown.text = text
        self.changed()

    def finish(self, results: Sequence[ToolResult]) -> None:
        """Set the text of the entry: all calls are over."""
        self.text = cleaned(results_text(results))

    def toggle(self) -> None:
        """Open all calls if none is open; otherwise fold all."""
        opened = not any(shown.is_open for shown in self.calls)
        for shown in self.calls:
            shown.is_open = opened
        self.changed()

    @property
    def is_folded(self) -> bool:
        return not all(shown.is_open for shown in self.calls)

    def unfold(self) -> None:
        for shown in self.calls:
            shown.is_open = True
        self.changed()

    def click(self, row: int, column: int) -> Click:
        if row in self._heads:
            shown = self.calls[self._heads.index(row)]
            shown.is_open = not shown.is_open
            self.changed()
            return Click("fold")
        return Click("message")

    def build(self, width: int) -> list[Section]:
        room = width - INDENT
        sections: list[Section] = []
        self._heads = []
        for shown in self.calls:
            self._heads.append(sum(len(section.lines) for section in sections))
            sections.append(Section([_head(shown, room)], [(" " * INDENT, "")]))
            if lines := _lines(shown, room - 2):
                sections.append(Section(lines, _BARS, "muted"))
        return sections


class RunEntry(Entry):
    """A code block that the user ran: shown like a call, but not part of the conversation."""

    def __init__(self, call: ToolCall) -> None:
        super().__init__()
        self._calls = ToolsEntry([call])

    @property
    def shown(self) -> CallView:
        return self._calls.calls[0]

    def show_state(self, state: str, seconds: float = 0.0, text: str | None = None) -> None:
        """Show the state of the run."""
        self._calls.show_state(0, state, seconds, text)
        self.changed()

    def toggle(self) -> None:
        """Open or fold its output."""
        self._calls.toggle()
        self.changed()

    def click(self, row: int, column: int) -> Click:
        if row == 0:
            self.toggle()
        return Click("fold")

    def build(self, width: int) -> list[Section]:
        return self._calls.build(width)


def subject(name: str, arguments: str) -> str:
    """Return what a call is about, its first argument, on one line."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return one_line(arguments)
    if not isinstance(given, dict) or not given:
        return ""
    first = next(iter(given.values()))
    return one_line(first if isinstance(first, str) else json.dumps(first, ensure_ascii=False))


def _head(shown: CallView, room: int) -> Line:
    style = _STYLES.get(shown.state, "muted")
    end = _WORDS.get(shown.state, shown.state)
    if shown.seconds >= 0.05:
        end += f" · {seconds_text(shown.seconds)}"
    mark = "▾ " if shown.is_open else "▸ "
    name = one_line(shown.name, 60)
    left = max(room - cells(mark) - cells(name) - cells(end) - 4, 0)
    about = elided(subject(shown.name, shown.arguments), left) if left > 3 else ""
    return [
        (mark, "thinking-head"),
        (name, "strong"),
        (f"  {about}" if about else "", "muted"),
        (f"  {end}", style),
    ]


def _lines(shown: CallView, room: int) -> list[Line]:
    if shown.state == "running" and not shown.is_open:
        rows = [row for row in cleaned(shown.text).split("\n") if row.strip()][-_TAIL:]
        return [[(elided(row.expandtabs(4), room), "")] for row in rows]
    if not shown.is_open:
        return []
    rows = visible(f"{_pretty(shown.arguments)}\n\n{shown.text}".strip()).split("\n")
    lines = [line for row in rows[:_MOST_LINES] for line in wrap([(row.expandtabs(4), "")], room)]
    if len(rows) > _MOST_LINES:
        lines.append([(f"{len(rows) - _MOST_LINES:,} more lines", "muted")])
    return lines


def _pretty(arguments: str) -> str:
    """Return every argument, in the form in which the user was asked about it."""
    try:
        return "\n".join(text for text, _ in arguments_shown(parsed(arguments)))
    except ToolError:
        return arguments
