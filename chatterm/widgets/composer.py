"""The composer: the text area in which messages and commands are written."""

from collections.abc import Callable, Iterable
from threading import Thread
from time import monotonic
from typing import ClassVar

from textual import events, on
from textual.binding import Binding, BindingType
from textual.document._document import Selection
from textual.message import Message
from textual.timer import Timer
from textual.widgets import TextArea

from chatterm.backends.backend import EngineError
from chatterm.commands.registry import is_command
from chatterm.conversation.attachment_errors import AttachmentError, NeedsYesError, NoFileError
from chatterm.conversation.attachments import (
    MessageWithFiles,
    attach,
    is_address,
    mentioned_server,
    mentions,
    working_folder,
)
from chatterm.markdown.lines import shortened
from chatterm.terminal.sanitize import cleaned
from chatterm.widgets.completion import Completion, Suggestion
from chatterm.widgets.folding import FoldingArea
from chatterm.widgets.history import PromptHistory
from chatterm.widgets.lookup import Lookup
from chatterm.widgets.paste import Pastes
from chatterm.widgets.server_completion import Tools
from chatterm.widgets.vim import Vim

_DRAFT_EVERY = 0.5
"""Seconds from a change until the draft is passed to `on_draft`."""
_READING = 5.0
"""Timeout for reading attached files, in seconds."""
_FETCHING = 20.0
"""Timeout for fetching pages or resources of servers, in seconds."""
_BOUNCE = 0.5
"""Seconds in which a second Enter with the same text is ignored, until the screen takes the first."""
_NEWLINE_KEYS = ("shift+enter", "alt+enter", "ctrl+j")
_PLACEHOLDER = "Write a message, / for commands, @ for files"


class Composer(FoldingArea):
    """The input. Enter sends; Shift+Enter (where the terminal reports it), Alt+Enter or Ctrl+J insert a line break."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+g", "edit_outside", "Editor", show=False)]

    class Submitted(Message):
        """Posted when the person sends the text. It stays in the composer until the screen calls `take_sent`."""

        def __init__(self, text: str, shown: str | None = None, recall: str | None = None) -> None:
            super().__init__()
            self.text = text
            """The message to send: pastes in full, attached files after it."""
            self.shown = text if shown is None else shown
            """What the composer showed: pastes as labels, files as `@path`."""
            self.recall = text if recall is None else recall
            """What Up brings back, here and in later sessions: pastes in full, files as `@path`."""

    class Problem(Message):
        """Posted when something failed; `text` is a line for the person. The composer keeps its text."""

        def __init__(self, text: str, *, doubted: str = "", asked: str = "") -> None:
            super().__init__()
            self.text = text
            self.doubted = doubted
            """The composer's text if another Enter sends it unchanged; "" otherwise."""
            self.asked = asked
            """The composer's text if another Enter attaches what it mentions; "" otherwise."""

    def __init__(
        self,
        *,
        completion: Completion | None = None,
        tools: Tools | None = None,
        sees: Callable[[], bool] = lambda: False,
        history: int = 1000,
        on_draft: Callable[[str], None] | None = None,
        vim: bool = False,
        id: str | None = None,
    ) -> None:
        self._attached: tuple[str, MessageWithFiles] | None = None  # first: the base class may draw at once
        """The latest text that mentions files, with those files."""
        super().__init__(id=id, placeholder=_PLACEHOLDER)
        self.vim = Vim() if vim else None
        """State of the vim keys; None if they are off."""
        self._completion = completion
        """The list of suggestions; the composer moves and chooses in it."""
        self._tools = tools
        """Starts MCP servers when a message attaches something of theirs."""
        self._sees = sees
        self._history = PromptHistory(history)
        self._on_draft = on_draft
        """Called with the full text, pastes included, soon after a change."""
        self._draft_timer: Timer | None = None
        self._mentioned = Lookup(self, "mentions", _read_mentions, self._show_attached)
        """For a text that mentions files, and whether the model sees pictures."""
        self._sent = ("", 0.0)
        """The text sent last that is still here, and when it was sent."""
        self._doubted = ""
        """The text for which a missing file was reported."""
        self._asked = ""
        """The text for which the person was asked whether to attach what it mentions."""
        self._reading = 0
        """Number of the latest request to read attachments."""
        self._reading_timer: Timer | None = None

    # --- for the screen ---

    def on_resize(self) -> None:
        self.placeholder = shortened(_PLACEHOLDER, self.content_size.width)

    def load_history(self, prompts: Iterable[str]) -> None:
        """Load the prompts of earlier sessions, newest last."""
        self._history.load(prompts)

    @property
    def sending_text(self) -> str:
        """What Enter would send. Attachments are included once read, a moment after a change."""
        if self._attached is None or self._attached[0] != self.text:
            return self.full_text
        return self._whole_message(self.pastes, self._attached[1])

    def put(self, text: str) -> None:
        self._sent = ("", 0.0)
        super().put(text)

    def take_sent(self) -> None:
        """Remove the submitted text; keep what was typed since, while the screen was busy."""
        self.put(self.text.removeprefix(self._sent[0]))

    def put_back(self, text: str) -> None:
        """Put back a text that was not sent, before anything written since."""
        draft = self.text
        self.put(text)
        if draft.strip():
            self.put(f"{self.text}\n{draft}")

    def take_away(self, text: str) -> None:
        """Undo `put_back` if the text is still there."""
        full = self.full_text
        if full == text or full.startswith(f"{text}\n"):
            self.put(full[len(text) + 1 :])

    # --- keys ---

    async def _on_key(self, event: events.Key) -> None:
        if self._vim_has(event) or self._used(event.key) or await self._acted(event.key):
            event.stop()
            event.prevent_default()
        else:
            await super()._on_key(event)

    class ModeChanged(Message):
        """Posted when a vim key was handled: the mode may have changed."""

    @property
    def vim_mode(self) -> str:
        """Vim's mode and pending keys for the status line; "" without vim keys."""
        if self.vim is None:
            return ""
        names = {"insert": "INSERT", "normal": "NORMAL", "visual": "VISUAL", "lines": "V-LINE"}
        return f"{names[self.vim.mode]} {self.vim.pending}".strip()

    def vim_takes(self, key: str) -> bool:
        """Handle `key` as a vim key. Return whether it was one."""
        vim = self.vim
        if vim is None or self.read_only or (vim.mode == "insert" and key != "escape"):
            return False
        text = self.text
        vim.take(text, self._index(*self.cursor_location) if vim.selection is None else vim.now.at)
        if not vim.press(key):
            return False
        if vim.now.text != text:
            self.replace(vim.now.text, (0, 0), self.document.end, maintain_selection_offset=False)
        at = self._location(vim.now.at, vim.now.text)
        selected = vim.selection
        if selected is None:
            self.move_cursor(at)
        else:
            first, last = (self._location(place, vim.now.text) for place in selected)
            self.selection = Selection(first, last) if vim.now.at >= vim.start else Selection(last, first)
        self.post_message(self.ModeChanged())
        return True

    def _vim_has(self, event: events.Key) -> bool:
        if self.vim is None or (
            self._completion is not None and self._completion.display and self.vim.mode == "insert"
        ):
            return False
        is_typed = event.character is not None and event.is_printable
        return self.vim_takes(event.character or "" if is_typed else event.key)

    def _location(self, at: int, text: str) -> tuple[int, int]:
        """Return the row and column of offset `at` in `text`."""
        before = text[:at]
        return before.count("\n"), len(before) - before.rfind("\n") - 1

    async def _acted(self, key: str) -> bool:
        """Run the key's binding now, before letters typed after it, which would overtake it if it bubbled."""
        for binding in self._bindings.key_to_bindings.get(key, []):
            if await self.app.run_action(binding.action, self):
                return True
        return False

    def _used(self, key: str) -> bool:
        """Handle `key` if the composer uses it. Return whether it did."""
        if self._complete(key):
            return True
        if key == "enter":
            self.send()
        elif key in _NEWLINE_KEYS:
            self.insert("\n")
            self.scroll_cursor_visible()
        elif key == "tab":
            self.insert("    ")
        else:
            return (key == "up" and self._recall(-1)) or (key == "down" and self._recall(1))
        return True

    def _recall(self, step: int) -> bool:
        """Step through the history: up from the first line, down from the last. Return whether the key was used."""
        at_edge = self.navigator.is_first_wrapped_line if step < 0 else self.navigator.is_last_wrapped_line
        text = self.full_text
        if not self._history.shows(text):
            self._history.leave()
            if step > 0 or not at_edge(self.cursor_location):
                return False
        found = self._history.step(step, text)
        if found is None:
            return step < 0 and self._history.shows(text)
        self.put(found)
        return True

    def _complete(self, key: str) -> bool:
        """Handle a key of the open list of suggestions. Return whether it was one."""
        if self._completion is None or not self._completion.display:
            return False
        self._completion.look(self.text, self._cursor_index)  # keys may come faster than change events
        chosen = self._completion.chosen
        if chosen is None:
            return False
        if key in ("up", "down"):
            self._completion.move(-1 if key == "up" else 1)
        elif key == "tab" or (
            key == "enter"
            and (self._completion.was_moved or not chosen.is_extra)
            and self.text.strip() != chosen.text.strip()
        ):
            self.choose(chosen, run=key == "enter")
        elif key == "escape":
            self._completion.close()
        else:
            return False
        return True

    def choose(self, suggestion: Suggestion, *, run: bool = False) -> None:
        """Insert a suggestion; with `run`, send it if it is complete."""
        if self._completion is not None:
            self._completion.close()
        self.replace(suggestion.text, (0, 0), self.document.end, maintain_selection_offset=False)
        end = len(suggestion.text) if suggestion.cursor is None else suggestion.cursor
        self.move_cursor(self._location(end, suggestion.text))
        if run and suggestion.complete:
            self.send()

    @property
    def _cursor_index(self) -> int:
        return self._index(*self.cursor_location)

    def _index(self, row: int, column: int) -> int:
        """Return the number of characters before a row and column."""
        return sum(len(line) + 1 for line in self.document.lines[:row]) + column

    @on(TextArea.Changed)
    def _text_changed(self) -> None:
        if self._completion is not None:
            self._completion.look(self.text, self._cursor_index)
        self._look_at_files()
        if self._on_draft is not None and self._draft_timer is None:
            self._draft_timer = self.set_timer(_DRAFT_EVERY, self._give_draft)

    def _give_draft(self) -> None:
        self._draft_timer = None
        if self._on_draft is not None:
            self._on_draft(self.full_text)

    @on(events.Unmount)
    def _give_last_draft(self) -> None:
        if self._draft_timer is not None:
            self._give_draft()

    # --- attached files ---

    def _look_at_files(self) -> None:
        """Read the mentioned files in a thread."""
        shown = self.text
        if "@" in shown and _mentions_files(shown):
            self._mentioned.ask((shown, self._sees()))
        else:
            self._attached = None
            self._mentioned.ask(None)

    def _show_attached(self, query: tuple[str, bool], attached: MessageWithFiles | None) -> None:
        if attached is not None and query[0] == self.text:
            self._attached = query[0], attached
            self._line_cache.clear()
            self.refresh()

    def marked(self, row: int) -> list[tuple[int, int]]:
        """Return the spans of labels and of mentions of existing files in line `row`."""
        labels = super().marked(row)
        if self._attached is None or self._attached[0] != self.text:
            return labels
        start = self._index(row, 0)
        length = len(self.document.get_line(row))
        files = [(a - start, b - start) for a, b in self._attached[1].places if start <= a < start + length]
        return labels + files

    @staticmethod
    def _whole_message(pastes: Pastes, attached: MessageWithFiles) -> str:
        return "\n\n".join([pastes.unfold(attached.message), *attached.blocks])

    # --- sending ---

    def send(self) -> None:
        """Send the text, as Enter does."""
        shown, recall = self.text, self.full_text
        if self.read_only or (shown == self._sent[0] and monotonic() - self._sent[1] < _BOUNCE):
            return
        self._sent = shown, monotonic()
        if not _mentions_files(shown):
            self._send(self.Submitted(recall, shown, recall))
            return
        self._reading += 1
        number, pastes = self._reading, self.pastes.copy()
        said_yes = shown == self._asked
        as_text = shown == self._doubted or said_yes
        paths = [mention.path for mention in mentions(shown)]
        names_server = any(map(mentioned_server, paths))
        servers = self._tools() if self._tools is not None and names_server else None
        sees = self._sees()
        self.read_only = True
        fetches = servers is not None or any(map(is_address, paths))
        self._reading_timer = self.set_timer(_FETCHING if fetches else _READING, self._give_up_reading)

        def read() -> None:
            result: Message
            try:
                attached = attach(
                    shown, working_folder(), as_text=as_text, said_yes=said_yes, servers=servers, sees=sees
                )
                text = self._whole_message(pastes, attached)
                result = self.Submitted(text, shown, recall)
            except NoFileError as error:
                result = self.Problem(f"{error} Press Enter again to send it as text.", doubted=shown)
            except NeedsYesError as error:
                result = self.Problem(f"{error} Press Enter again to attach and send it.", asked=shown)
            except AttachmentError as error:
                result = self.Problem(str(error))
            self.call_later(self._files_read, number, result)

        Thread(target=read, name="attachments", daemon=True).start()

    def _files_read(self, number: int, result: Message) -> None:
        """Send a message whose attachments were read, or could not be."""
        if number == self._reading and self.read_only:
            self._end_reading()
            self._send(result)

    def _give_up_reading(self) -> None:
        if self.read_only:
            self._end_reading()
            self.post_message(self.Problem("The attachments take too long to read; nothing was sent."))

    def _end_reading(self) -> None:
        self.read_only = False
        if self._reading_timer is not None:
            self._reading_timer.stop()

    def _send(self, message: Message) -> None:
        if isinstance(message, self.Submitted):
            self._history.add(message.recall)
        elif isinstance(message, self.Problem):
            self._doubted = message.doubted or self._doubted
            self._asked = message.asked
        self.post_message(message)

    # --- another editor ---

    def action_edit_outside(self) -> None:
        """Edit the text in $VISUAL or $EDITOR; put what is saved there into the composer."""
        from chatterm.terminal.editor import edit_text

        if self.read_only:
            return
        try:
            text = edit_text(self.app, self.full_text)
        except EngineError as error:
            self.post_message(self.Problem(str(error)))
            return
        self.put(cleaned(text).removesuffix("\n"))


def _mentions_files(text: str) -> bool:
    return not is_command(text) and next(mentions(text), None) is not None


def _read_mentions(query: tuple[str, bool]) -> MessageWithFiles | None:
    """Return what a text attaches for a model that sees pictures or not; None if it cannot be sent as it is."""
    shown, sees = query
    try:
        return attach(shown, working_folder(), as_text=True, fetches=False, sees=sees)
    except AttachmentError:
        return None
