"""The text in the composer: messages, commands and edits, and the draft put aside meanwhile."""

from collections.abc import Callable
from functools import partial

from chatterm.backends.backend import EngineError, Exchange
from chatterm.commands.registry import Command, is_command, parse
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart
from chatterm.terminal.sanitize import cleaned


class Writing(ScreenPart):
    def __init__(self, screen: ChatBase, run: Callable[[Command, str], None]) -> None:
        """Create the part; `run` runs a command with its argument."""
        super().__init__(screen)
        self._run = run
        self._shelved = ""
        """The draft put aside while a command or an edit is in the composer."""

    @property
    def is_editing(self) -> bool:
        return self.screen.editing is not None

    def submitted(self, text: str, recall: str) -> None:
        """Run or send the submitted text. `recall` is the form kept in the prompt history."""
        screen = self.screen
        if not text.strip():
            return
        if is_command(text):
            screen.attempt(partial(self._command, text.strip()))
        elif screen.info is None and not screen.is_loading:
            screen.say("No model is loaded. /model loads one; your text is kept.", "error")
        elif self.screen.editing is not None:
            screen.attempt(partial(self._send_edit, self.screen.editing, text.strip("\n"), recall))
        else:
            screen.composer.take_sent()
            screen.conversation.saved.draft("")
            self.send_as_it_is(text, recall)
            if self._shelved and not screen.composer.text:
                self._unshelve()

    def send_as_it_is(self, text: str, recall: str) -> None:
        """Send a text written by others: no part of it is taken as a command or attaches a file."""
        screen = self.screen
        if screen.info is None and not screen.is_loading:
            raise EngineError("No model is loaded. /model loads one.")
        screen.conversation.saved.add_prompt(recall)
        waits = "the model" if screen.is_loading else "the answer" if self.conversation.turn else ""
        self.conversation.send(text.strip("\n"), note=f"waits for {waits}" if waits else "")
        if not waits:
            self.conversation.next(screen.model_name)

    def send_for(self, text: str) -> None:
        """Send `text` as if it had been typed; the present draft is put back afterwards."""
        if not text.strip():
            raise EngineError("The prompt is empty; write something into its file.")
        self._shelve()
        self.screen.composer.put(f" {text}" if is_command(text) else text)
        self.screen.composer.send()

    def _command(self, text: str) -> None:
        command, argument = parse(text)
        if self.is_editing:
            self.screen.composer.put("")
            self.end_edit()
        else:
            self._unshelve()
        self._run(command, argument)

    def _send_edit(self, exchange: Exchange, text: str, recall: str) -> None:
        self.conversation.edit(exchange, text, self.screen.model_name)
        self.conversation.saved.add_prompt(recall)
        self.end_edit()

    def begin_edit(self, exchange: Exchange) -> None:
        """Put the exchange's message into the composer; Enter then sends it as a new branch."""
        self._shelve()
        self._mark(exchange)
        self.transcript.select(self.conversation.entries_of(exchange)[0])  # scrolls it into view
        self.screen.back_to_composer()
        self.screen.composer.put(cleaned(exchange.user))

    def _mark(self, editing: Exchange | None) -> None:
        """Mark the message being edited, and only that; None marks none."""
        for exchange in filter(None, (self.screen.editing, editing)):
            entry, _ = self.conversation.entries_of(exchange)
            entry.is_edited = exchange is editing
            entry.changed()
        self.screen.editing = editing
        self.transcript.update()

    def end_edit(self) -> None:
        if self.screen.editing is not None:
            self._mark(None)
            self._unshelve()
            self.aim()
            self.screen.show_standing_hint()

    def aim(self) -> None:
        """Set the backend's history to what precedes the composer's text, if a model is loaded."""
        if self.screen.info is not None and not self.screen.is_loading:
            self.conversation.aim(self.screen.editing)

    def begin_command(self, command: Command) -> None:
        """Put the command into the composer, for its argument."""
        self._shelve()
        self.aim()
        self.screen.back_to_composer()
        self.screen.composer.put(f"/{command.name} ")

    def give_up(self) -> bool:
        """Cancel an edit or a command and restore the draft. Return False if there is neither."""
        if self.is_editing:
            self.end_edit()
        elif is_command(self.screen.composer.text):
            self._unshelve()
        else:
            return False
        return True

    def keep_draft(self, text: str, *, leaving: bool = False) -> None:
        """Save the draft. An edit is saved only when `leaving` after an error, since it cannot be resumed."""
        if (leaving or not self.is_editing) and not is_command(text):
            self.conversation.saved.draft(text)

    def leave_draft(self) -> None:
        """Save the draft with this conversation and clear the composer, before another one is shown."""
        if self.conversation.saved.store is None:
            return  # the draft would be lost
        if is_command(self.screen.composer.text):
            self._unshelve()
        self.keep_draft(self.screen.composer.full_text)
        self.screen.composer.put("")

    def show_draft(self, draft: str) -> None:
        """Put the draft of this conversation into the composer, unless that has text."""
        if draft and not self.screen.composer.text:
            self.screen.composer.put(cleaned(draft))

    def _shelve(self) -> None:
        text = self.screen.composer.full_text
        if self.is_editing:
            self._mark(None)
        elif text.strip() and not is_command(text):
            self._shelved = text

    def _unshelve(self) -> None:
        text, self._shelved = self._shelved, ""
        self.screen.composer.put(text)
