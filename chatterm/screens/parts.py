"""What the commands of the chat screen share."""

from typing import TYPE_CHECKING

from chatterm.backend import EngineError
from chatterm.entries import AnswerEntry, Entry, UserEntry
from chatterm.sessions.records import Exchange

if TYPE_CHECKING:
    from chatterm.conversation import Conversation
    from chatterm.screens.chat import ChatScreen
    from chatterm.widgets.transcript import Transcript

LOADING = "The model is still loading."


class ScreenPart:
    """Some commands of one screen. They raise EngineError (one line) for what cannot be done."""

    def __init__(self, screen: "ChatScreen") -> None:
        self.screen = screen

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
                f"{number!r} is no number; messages are counted from 1, from the end with -1."
            ) from None
        if not path:
            raise EngineError("There is no message yet.")
        if not index or not -len(path) <= index <= len(path):
            raise EngineError(f"There is no message {index}; there are {len(path)}.")
        return path[index - 1 if index > 0 else index]

    def answer_of(self, exchange: Exchange) -> AnswerEntry:
        return self.conversation.entries_of(exchange)[1]

    def message_of(self, exchange: Exchange) -> UserEntry:
        return self.conversation.entries_of(exchange)[0]
