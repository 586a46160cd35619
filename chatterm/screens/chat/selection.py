"""The selected message of the chat screen: selection by click, and the keys that act on it."""

from functools import partial

from textual import events

from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.screens.chat.actions import ChatActions
from chatterm.screens.chat.base import ChatBase
from chatterm.widgets.message_keys import CODE_KEYS, EDGE_KEYS, MESSAGE_KEYS
from chatterm.widgets.transcript import Transcript


class MessageSelection(ChatBase):
    """The transcript has the focus while a message is selected."""

    actions: ChatActions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave End to the composer unless there is new text below and its cursor is at the end, and Ctrl+R to vim."""
        if action == "jump_down":
            at_end = self.composer.cursor_location == self.composer.document.end
            return self.is_mounted and self.transcript.has_news and at_end
        if action == "run_command" and parameters == ("retry", "") and self.is_mounted:
            vim = self.composer.vim  # Ctrl+R is vim's redo there
            return vim is None or vim.mode == "insert" or self.focused is not self.composer
        return super().check_action(action, parameters)

    def action_jump_down(self) -> None:
        self.transcript.follow()

    def action_copy_block(self) -> None:
        self.attempt(self.actions.copy_block)

    def action_save_code(self) -> None:
        self.attempt(self.actions.save_code)

    def action_run_code(self) -> None:
        self.attempt(self.actions.run_code)

    def action_change_view(self) -> None:
        self.attempt(self.actions.change_view)

    def on_transcript_clicked(self, message: Transcript.Clicked) -> None:
        entry, click = message.entry, message.click
        match click.what:
            case "prev" | "next":
                self.attempt(partial(self._step, entry, -1 if click.what == "prev" else 1))
            case "copy" if isinstance(entry, AnswerEntry):
                self.attempt(partial(self.actions.copy_code, str(click.number), entry))
            case _ if entry is self.transcript.selected or not isinstance(entry, UserEntry | AnswerEntry):
                self.back_to_composer()
            case _:
                self.select(entry)

    def _step(self, entry: Entry, side: int) -> None:
        was_selected = entry is self.transcript.selected
        there = self.conversation.step(entry, side)
        if was_selected and there is not None:
            self.transcript.select(there)

    def on_key(self, event: events.Key) -> None:
        """Pass a key that the selected message does not use on to the composer."""
        known = (
            event.key in {*MESSAGE_KEYS, *EDGE_KEYS, *CODE_KEYS}
            or event.character is None
            or not event.is_printable
        )
        # The composer handles all its characters, so this one was on its way to the transcript.
        is_late = self.focused is self.composer and event.is_printable and not self.composer.read_only
        if (self.focused is self.transcript and not known) or is_late:
            event.stop()
            self.back_to_composer()
            self.composer.insert(event.character or "")

    def on_paste(self, event: events.Paste) -> None:
        """Pass a paste on to the composer, which has not handled it if it bubbles up to here."""
        self.back_to_composer()
        self.composer.post_message(events.Paste(event.text))
