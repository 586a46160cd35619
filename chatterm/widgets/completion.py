"""The list that opens while a `/command` or an `@path` is being typed."""

from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

from textual import events
from textual.message import Message

from chatterm.backends.backend import EngineError
from chatterm.commands.completing import choice_completions, completions, is_whole, path_start
from chatterm.conversation.attachments import working_folder
from chatterm.markdown.lines import Line, cells, elided, padded
from chatterm.widgets.canvas import Canvas
from chatterm.widgets.lookup import Lookup
from chatterm.widgets.path_completion import FoundPath, PathToken, found_paths, path_token
from chatterm.widgets.server_completion import (
    Tools,
    argument_help,
    found_resources,
    found_values,
    is_argument,
    server_names,
    unknown_server,
)

_ROWS = 8


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A row of the list: its label, and the text that choosing it puts into the composer."""

    label: str
    help: str
    text: str
    complete: bool
    """Whether `text` can be run as it is."""
    cursor: int | None = None
    """Where in `text` to go on writing; None: at its end."""
    is_extra: bool = False
    """The text is valid without it: Enter sends the text unless the arrows chose this row; Tab takes it."""


def suggestions(text: str) -> list[Suggestion]:
    """Return the completions of the command line `text`."""
    found = [
        Suggestion(
            f"/{name} {c.arguments}".strip(),
            c.help if name == c.name else f"/{c.name}: {c.help}",
            f"/{name} " if c.arguments else f"/{name}",
            not c.arguments,
        )
        for name, c in completions(text)
    ]
    whole = not found and is_whole(text)
    return found or [
        Suggestion(
            line.rstrip(),
            argument_help(line) if line.endswith("=") else "",
            line,
            not line.endswith((" ", "=")),
            is_extra=whole or line.endswith("="),
        )
        for line in choice_completions(text)
    ]


def file_suggestions(text: str, token: PathToken, found: list[FoundPath]) -> list[Suggestion]:
    """Return the command line `text` completed with each path. A typed name makes them extras: it may be a new file."""
    written = bool(token.path.strip())
    return [
        Suggestion(
            path.path, path.note, text[: token.start] + path.path, not path.is_folder, is_extra=written
        )
        for path in found
    ]


def path_suggestions(text: str, token: PathToken, found: list[FoundPath]) -> list[Suggestion]:
    """Return `text` with the token replaced by each path. All are extras: Enter sends the message as written."""
    before, after = text[: token.start], text[token.end :]
    return [
        Suggestion(
            path.path,
            path.note,
            before + path.written + after,
            False,
            len(before) + len(path.written),
            is_extra=True,
        )
        for path in found
    ]


def _wanted_path(text: str, cursor: int) -> PathToken | None:
    """Return the path being typed: after an @ in a message, or as the argument of a command."""
    if not text.startswith("/"):
        return path_token(text, cursor) if "@" in text else None
    start = path_start(text)
    return None if start is None or cursor < len(text) else PathToken(start, cursor, text[start:])


def _values(lines: list[str]) -> list[Suggestion]:
    return [Suggestion(line, "", line, False, is_extra=True) for line in lines]


class Completion(Canvas):
    """The list of suggestions. Up and Down move; Tab, a click, or Enter after moving chooses; Esc closes."""

    class SuggestionSelected(Message):
        """A row was clicked."""

        def __init__(self, suggestion: Suggestion) -> None:
            super().__init__()
            self.suggestion = suggestion

    def __init__(self, *, tools: Tools | None = None, id: str | None = None) -> None:
        """Create the list; `tools` starts MCP servers when their offers are needed, None disables them."""
        super().__init__(id=id)
        self._tools = tools
        self._lines: list[str] = []
        """The server's latest completions of an argument."""
        self._learned: set[str] = set()
        """Servers that were asked for their offers."""
        self._all: list[Suggestion] = []
        self._index = 0
        self.was_moved = False
        """Whether the row was chosen with the arrows."""
        self._text = ""
        self._search = Lookup(self, "path completion", self._paths, self._show_paths)
        """For a text and the path in it."""
        self._arguments = Lookup(self, "server values", self._completed, self._show_values)
        """For a text that ends in an argument of a server's prompt."""
        self._found: tuple[PathToken, list[FoundPath]] | None = None
        """The latest search result."""
        self.display = False

    def look(self, text: str, cursor: int | None = None) -> None:
        """Update the list for the composer's `text`, with the cursor after `cursor` characters (None: at the end)."""
        self._text = text
        token = _wanted_path(text, len(text) if cursor is None else cursor)
        if token is not None:
            if self._search.wanted != (text, token):
                self._narrow(text, token)
                self._search.ask((text, token))
            return
        self._search.ask(None)
        found = suggestions(text)
        if not found and is_argument(text):
            # Until the server answers, show what still matches of its last answer.
            found = _values([line for line in self._lines if line.lower().startswith(text.lower())])
            self._arguments.ask(text)
        self._show(found, text)

    def _paths(self, query: tuple[str, PathToken]) -> list[FoundPath]:
        """Search the disk, and what servers offer. Called in the search thread."""
        text, token = query
        found = found_paths(token.path, working_folder())
        if text.startswith("/"):
            return found
        names = server_names() if self._tools is not None else []
        self._learn(unknown_server(token.path, names))
        return [*found_resources(token.path, names), *found]

    def _completed(self, text: str) -> list[str]:
        return found_values(text, self._tools) if self._tools is not None else []

    def _learn(self, server: str) -> None:
        """Ask a server for its offers, once. Called from the search thread."""
        if self._tools is None or not server or server in self._learned:
            return
        self._learned.add(server)
        tools = self._tools

        def learn() -> None:
            with suppress(EngineError):  # attaching something of it reports the error
                tools().learn(server)
                self.call_later(lambda: self._search.ask(self._search.wanted))

        Thread(target=learn, name="server offers", daemon=True).start()

    def _show_values(self, text: str, lines: list[str]) -> None:
        if self._text == text:
            self._lines = lines
            self._show(_values(lines), text)

    def _show_paths(self, query: tuple[str, PathToken], found: list[FoundPath]) -> None:
        text, token = query
        self._found = token, found
        self._show_found(text, token, found)

    def _narrow(self, text: str, token: PathToken) -> None:
        """Show what still matches of the last search until the new one ends; nothing found for another text."""
        paths: list[FoundPath] = []
        if self._found is not None:
            before, found = self._found
            if token.path.startswith(before.path) and "/" not in token.path.removeprefix(before.path):
                paths = found
        name = token.path.rpartition("/")[2].lower()
        self._show_found(
            text, token, [p for p in paths if name in p.path.rstrip("/").rpartition("/")[2].lower()]
        )

    def _show_found(self, text: str, token: PathToken, found: list[FoundPath]) -> None:
        if len(found) == 1 and found[0].path == token.path and not found[0].is_folder:
            found = []
        if text.startswith("/"):
            whole = is_whole(text)
            choices = [Suggestion(line, "", line, True, is_extra=whole) for line in choice_completions(text)]
            self._show([*choices, *file_suggestions(text, token, found)], text)
        else:
            self._show(path_suggestions(text, token, found), "")

    def _show(self, found: list[Suggestion], text: str) -> None:
        if len(found) == 1 and found[0].text == text:
            found = []
        if found != self._all:
            self._all, self._index, self.was_moved = found, 0, False
        self._open(bool(self._all))
        if self._all:
            self.styles.height = min(len(self._all), self._rows)
            self.refresh()

    def close(self) -> None:
        self._all, self.was_moved = [], False
        self._search.ask(None)
        self._open(False)

    def _open(self, is_open: bool) -> None:
        self.display = is_open
        self.mark_parent("-completing", is_open)

    @property
    def _rows(self) -> int:
        return max(min(_ROWS, self.screen.size.height // 3), 1)

    @property
    def chosen(self) -> Suggestion | None:
        return self._all[self._index] if self._all and self.display else None

    def move(self, step: int) -> None:
        self._index, self.was_moved = (self._index + step) % len(self._all), True
        self.refresh()

    def build(self, width: int) -> list[Line]:
        column = min(max((cells(item.label) for item in self._all), default=0) + 3, width // 2)
        if not any(item.help for item in self._all):
            column = width - 2
        lines: list[Line] = []
        for number, item in list(enumerate(self._all))[self._first : self._first + self._rows]:
            chosen = "chosen" if number == self._index else ""
            label, text = elided(item.label, column - 2), elided(item.help, max(width - column - 3, 0))
            line: Line = [("  ", chosen), *padded([(label, f"primary {chosen}")], column, chosen)]
            line.append((text, f"muted {chosen}"))
            lines.append(padded(line, width, chosen))
        return lines

    @property
    def _first(self) -> int:
        return max(min(self._index - self._rows // 2, len(self._all) - self._rows), 0)

    def on_click(self, event: events.Click) -> None:
        row = self._first + event.y
        if row < len(self._all):
            self.post_message(self.SuggestionSelected(self._all[row]))
