"""The base of the parts of the chat screen."""

from chatterm.conversation.entries import Entry
from chatterm.conversation.screen_conversation import ScreenConversation
from chatterm.screens.chat.base import ChatBase
from chatterm.widgets.transcript import Transcript


class ScreenPart:
    """One part of a screen's behaviour; commands that fail raise EngineError (one line)."""

    def __init__(self, screen: ChatBase) -> None:
        self.screen = screen

    @property
    def conversation(self) -> ScreenConversation:
        return self.screen.conversation

    @property
    def transcript(self) -> Transcript:
        return self.screen.transcript

    @property
    def selected(self) -> Entry | None:
        return self.transcript.selected
