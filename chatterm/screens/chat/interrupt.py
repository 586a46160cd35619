"""Ctrl+C: copies a selection, else stops an answer or a waiting message, else clears the draft; twice quits."""

from functools import partial
from time import monotonic

from chatterm.screens.chat.chat import Chat

_AGAIN = 3.0
"""Seconds within which a second Ctrl+C quits."""


class Interrupt:
    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._armed_at: float | None = None
        """The time of the press after which another one quits."""
        self._cleared = False
        """Whether that press cleared the draft."""

    @property
    def _is_armed(self) -> bool:
        """Whether another press quits: not once an answer has started since, which that press would be meant for."""
        if self._armed_at is None or monotonic() - self._armed_at >= _AGAIN:
            return False
        latest = self._chat.conversation.turn or self._chat.conversation.ended
        return latest is None or latest.started <= self._armed_at

    def press(self) -> None:
        chat = self._chat
        if text := chat.composer.selected_text:
            self._copy(text)
        elif (selection := chat.transcript.text_selection) is not None:
            chat.in_slices(chat.transcript.selected_text(selection), self._copy)
        else:
            self._stop()

    def _copy(self, text: str) -> None:
        if not text:  # only decoration was selected
            self._stop()
            return
        self._chat.attempt(partial(self._chat.copy_text, text))
        self._chat.clear_selection()

    def _stop(self) -> None:
        chat, talk = self._chat, self._chat.conversation
        if self._is_armed:
            if self._cleared and not chat.composer.text:
                chat.composer.undo()  # the next start restores the draft
            chat.quit()
        elif talk.turn is not None and talk.waiting:
            talk.stop()
            chat.hint("Stopped; your next message is answered now. Ctrl+C stops that too.", _AGAIN)
        else:
            self._armed_at, self._cleared = monotonic(), False
            if chat.stop_answer():
                chat.hint("Stopped. Ctrl+C again quits.", _AGAIN)
            elif chat.take_back():
                chat.hint("Your message was not sent. Ctrl+C again quits.", _AGAIN)
            elif chat.composer.text and not chat.composer.read_only:
                self._cleared = True
                chat.composer.clear()
                chat.hint("Draft cleared; Ctrl+Z brings it back. Ctrl+C again quits.", _AGAIN)
            else:
                chat.hint("Ctrl+C again quits.", _AGAIN)
