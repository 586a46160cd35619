"""Ctrl+C: copies a selection, else stops an answer or a waiting message, else clears the draft; twice quits."""

from functools import partial
from time import monotonic

from chatterm.screens.chat.actions import ChatActions
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart

_AGAIN = 3.0
"""Seconds within which a second Ctrl+C quits."""


class Interrupt(ScreenPart):
    def __init__(self, screen: ChatBase, actions: ChatActions) -> None:
        super().__init__(screen)
        self._actions = actions
        self._armed_at: float | None = None
        """The time of the press after which another one quits."""
        self._cleared = False
        """Whether that press cleared the draft."""

    @property
    def _is_armed(self) -> bool:
        """Whether another press quits: not once an answer has started since, which that press would be meant for."""
        if self._armed_at is None or monotonic() - self._armed_at >= _AGAIN:
            return False
        latest = self.conversation.turn or self.conversation.ended
        return latest is None or latest.started <= self._armed_at

    def press(self) -> None:
        if text := self.screen.composer.selected_text:
            self._copy(text)
        elif (selection := self.transcript.text_selection) is not None:
            self.screen.in_slices(self.transcript.selected_text(selection), self._copy)
        else:
            self._stop()

    def _copy(self, text: str) -> None:
        if not text:  # only decoration was selected
            self._stop()
            return
        self.screen.attempt(partial(self._actions.copy_text, text))
        self.screen.clear_selection()

    def _stop(self) -> None:
        screen, talk = self.screen, self.conversation
        if self._is_armed:
            if self._cleared and not screen.composer.text:
                screen.composer.undo()  # the next start restores the draft
            self._actions.quit()
        elif talk.turn is not None and talk.waiting:
            talk.stop()
            screen.hint("Stopped; your next message is answered now. Ctrl+C stops that too.", _AGAIN)
        else:
            self._armed_at, self._cleared = monotonic(), False
            if talk.turn is not None or talk.acting is not None:
                self._actions.stop()
                screen.hint("Stopped. Ctrl+C again quits.", _AGAIN)
            elif talk.waiting:
                talk.take_back()
                screen.hint("Your message was not sent. Ctrl+C again quits.", _AGAIN)
            elif screen.composer.text and not screen.composer.read_only:
                self._cleared = True
                screen.composer.clear()
                screen.hint("Draft cleared; Ctrl+Z brings it back. Ctrl+C again quits.", _AGAIN)
            else:
                screen.hint("Ctrl+C again quits.", _AGAIN)
