"""What the commands of the chat screen share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from chatterm.backends.backend import EngineError, ModelError
from chatterm.conversation.entries import AnswerEntry, Entry
from chatterm.markdown.lines import Line
from chatterm.sessions.records import Exchange
from chatterm.terminal.error_log import error_line, write_down
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from chatterm.conversation.conversation import Conversation
    from chatterm.screens.chat.screen import ChatScreen
    from chatterm.widgets.transcript import Transcript

LOADING = "The model is still loading."


def problem_text(error: Exception) -> str:
    """What went wrong, in one line. What nobody foresaw is written down."""
    if isinstance(error, EngineError | ModelError):
        return one_line(str(error))
    if isinstance(error, OSError):
        return one_line(f"{error.strerror or error}: {error.filename or ''}".rstrip(": ") + ".")
    return f"{error_line(error)} The chat continues. {write_down(error)}"


def undone_text(count: int) -> str:
    """How to come back to messages that were undone; "" where there are none."""
    if not count:
        return ""
    what, which = ("message", "it") if count == 1 else ("messages", "one")
    return f"{count:,} {what} undone; /redo (Alt+Z) restores {which}."


def file_path(text: str) -> Path:
    """A path as a person writes it, also with ~ and in quotes. Raises EngineError for the home of nobody."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise EngineError(f"{text.split('/')[0]} is not a home folder here; write the full path.") from None


class ScreenPart:
    """Some commands of one screen. They raise EngineError (one line) for what cannot be done."""

    def __init__(self, screen: "ChatScreen") -> None:
        self.screen = screen

    def report(self, name: str, title: str, builder: Callable[[int], list[Line]]) -> None:
        """Show what the command `name` has to say, as lines for a width, over the conversation."""
        from chatterm.screens.report import ReportScreen

        def closed(other: str | None) -> None:
            if other is not None:
                self.screen.action_run_command(other, "")

        self.screen.app.push_screen(ReportScreen(name, title, builder), closed)

    @property
    def conversation(self) -> "Conversation":
        return self.screen.conversation

    @property
    def transcript(self) -> "Transcript":
        return self.screen.transcript

    @property
    def selected(self) -> Entry | None:
        return self.transcript.selected

    def chosen_exchange(self) -> Exchange | None:
        """That of the selected message, else the last one; None when there is none."""
        path = self.conversation.path
        found = self.conversation.exchange_of(self.selected) if self.selected is not None else None
        return found or (path[-1] if path else None)

    def nth_exchange(self, number: str) -> Exchange:
        """The n-th of the selected branch, from 1, or from the end when negative."""
        path = self.conversation.path
        try:
            index = int(number)
        except ValueError:
            raise EngineError(
                f"{number!r} is not a number; messages are numbered from 1, or from the end with -1."
            ) from None
        if not path:
            raise EngineError("There is no message yet.")
        if not index or not -len(path) <= index <= len(path):
            raise EngineError(f"There is no message {index}; the conversation has {len(path)}.")
        return path[index - 1 if index > 0 else index]

    def answer_of(self, exchange: Exchange) -> AnswerEntry:
        return self.conversation.entries_of(exchange)[1]
