"""Where the person writes."""

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
    mentioned_server,
    mentions,
    working_folder,
)
from chatterm.markdown.lines import shortened
from chatterm.terminal.sanitize import cleaned
from chatterm.widgets.completion import Completion, Suggestion
from chatterm.widgets.folding import FoldingArea
from chatterm.widgets.history import PromptHistory
from chatterm.widgets.paste import Pastes
from chatterm.widgets.server_completion import Tools
from chatterm.widgets.vim import Vim

_DRAFT_EVERY = 0.5
"""Seconds from a change to the draft that is given away."""
_READING = 5.0
"""Seconds that attached files may take to be read."""
_FETCHING = 20.0
"""Seconds that pages may take to be fetched."""
_BOUNCE = 0.5
"""Seconds in which a second Enter sends nothing while the screen still has to take the text of the first."""
_NEWLINE_KEYS = ("shift+enter", "alt+enter", "ctrl+j")
_PLACEHOLDER = "Write a message, / for commands, @ for files"


class Composer(FoldingArea):
    """Enter sends; Shift+Enter (where the terminal reports it), Alt+Enter or Ctrl+J break the line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+g", "edit_outside", "Editor", show=False)]

    class Submitted(Message):
        """The person pressed Enter. The text stays until the screen takes it."""

        def __init__(self, text: str, shown: str | None = None, recall: str | None = None) -> None:
            super().__init__()
            self.text = text
            """What is sent: pastes whole, attached files behind it."""
            self.shown = text if shown is None else shown
            """What the composer showed: pastes as labels, files as `@path`."""
            self.recall = text if recall is None else recall
            """What Up brings back, here and in later sessions: pastes whole, files as `@path`."""

    class Problem(Message):
        """Something could not be done; `text` is one line for the person. What was written is still there."""

        def __init__(self, text: str, *, doubted: str = "", asked: str = "") -> None:
            super().__init__()
            self.text = text
            self.doubted = doubted
            """What the composer shows, where it is sent as it is when Enter is pressed once more."""
            self.asked = asked
            """The same where what it mentions is attached then."""

    class Read(Message):
        """The files that a message attaches were read, or could not be."""

        def __init__(self, number: int, result: Message) -> None:
            super().__init__()
            self.number = number
            self.result = result

    class Looked(Message):
        """What `shown` attaches as it stands; None where it cannot be sent like this."""

        def __init__(self, shown: str, attached: MessageWithFiles | None) -> None:
            super().__init__()
            self.shown = shown
            self.attached = attached

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
        self._attached: tuple[str, MessageWithFiles] | None = None  # first: a line may be drawn at once
        """The latest text that mentions files, and these."""
        super().__init__(id=id, placeholder=_PLACEHOLDER)
        self.vim = Vim() if vim else None
        """Vim's keys, where they are wanted."""
        self._completion = completion
        """The list that follows what is typed; the composer moves and chooses in it."""
        self._tools = tools
        self._sees = sees
        """Starts MCP servers, where a message attaches something of theirs."""
        self._history = PromptHistory(history)
        self._on_draft = on_draft
        """Gets the whole text, pastes and all, soon after it changed."""
        self._draft_timer: Timer | None = None
        self._looking = False
        """Whether a thread reads what is mentioned."""
        self._sent = ("", 0.0)
        """The text that was sent last and is still here, and when that was."""
        self._doubted = ""
        """The text of which was said that something in it is no file."""
        self._asked = ""
        """The text of which was asked whether what it mentions shall be attached."""
        self._reading = 0
        """Number of the latest reading of attached files."""
        self._reading_timer: Timer | None = None

    # --- for the screen ---

    def on_resize(self) -> None:
        self.placeholder = shortened(_PLACEHOLDER, self.content_size.width)

    def load_history(self, prompts: Iterable[str]) -> None:
        """What earlier sessions sent, newest last."""
        self._history.load(prompts)

    @property
    def sending_text(self) -> str:
        """What Enter would send, as far as the attached files are known: they are read a moment after a change."""
        if self._attached is None or self._attached[0] != self.text:
            return self.full_text
        return self._whole_message(self.pastes, self._attached[1])

    def put(self, text: str) -> None:
        self._sent = ("", 0.0)
        super().put(text)

    def take_sent(self) -> None:
        """What was submitted goes; what was typed since, while the screen was busy, stays."""
        self.put(self.text.removeprefix(self._sent[0]))

    def put_back(self, text: str) -> None:
        """Give back what could not be sent, before anything written since."""
        draft = self.text
        self.put(text)
        if draft.strip():
            self.put(f"{self.text}\n{draft}")

    def take_away(self, text: str) -> None:
        """Undo `put_back`, where what was given back is still there."""
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
        """Vim's mode is another one."""

    @property
    def vim_mode(self) -> str:
        """As the status line says it; "" without vim's keys."""
        if self.vim is None:
            return ""
        names = {"insert": "INSERT", "normal": "NORMAL", "visual": "VISUAL", "lines": "V-LINE"}
        return f"{names[self.vim.mode]} {self.vim.pending}".strip()

    def vim_takes(self, key: str) -> bool:
        """Whether vim's keys mean something by `key`; then it is done."""
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
        """The row and column of a place in `text`."""
        before = text[:at]
        return before.count("\n"), len(before) - before.rfind("\n") - 1

    async def _acted(self, key: str) -> bool:
        """Do what a key is bound to at once. Left to bubble it would come after letters that were typed after it."""
        for binding in self._bindings.key_to_bindings.get(key, []):
            if await self.app.run_action(binding.action, self):
                return True
        return False

    def _used(self, key: str) -> bool:
        """Do what `key` means here, if anything."""
        if self._complete(key):
            return True
        if key == "enter":
            self._submit()
        elif key in _NEWLINE_KEYS:
            self.insert("\n")
            self.scroll_cursor_visible()
        elif key == "tab":
            self.insert("    ")
        else:
            return (key == "up" and self._recall(-1)) or (key == "down" and self._recall(1))
        return True

    def _recall(self, step: int) -> bool:
        """Go through the history, from the first line up and from the last line down."""
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
        """Keys that belong to the open list."""
        if self._completion is None or not self._completion.display:
            return False
        self._completion.look(self.text, self._cursor_index)  # keys may have come faster than it was told
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
        """Take a suggestion; `run` sends it where it is whole."""
        if self._completion is not None:
            self._completion.close()
        self.replace(suggestion.text, (0, 0), self.document.end, maintain_selection_offset=False)
        end = len(suggestion.text) if suggestion.cursor is None else suggestion.cursor
        self.move_cursor(self._location(end, suggestion.text))
        if run and suggestion.complete:
            self._submit()

    @property
    def _cursor_index(self) -> int:
        return self._index(*self.cursor_location)

    def _index(self, row: int, column: int) -> int:
        """Characters before a place."""
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
        """Read what the text mentions, in a thread of its own: one at a time, then the latest text."""
        shown = self.text
        if "@" not in shown or not _mentions_files(shown):
            self._attached = None
        elif not self._looking:
            self._looking = True
            sees = self._sees()

            def look() -> None:
                try:
                    found = attach(shown, working_folder(), as_text=True, fetches=False, sees=sees)
                    self.post_message(self.Looked(shown, found))
                except AttachmentError:
                    self.post_message(self.Looked(shown, None))

            Thread(target=look, name="mentions", daemon=True).start()

    @on(Looked)
    def _files_looked_at(self, message: Looked) -> None:
        message.stop()
        self._looking = False
        if message.shown != self.text:
            self._look_at_files()
        elif message.attached is not None:
            self._attached = message.shown, message.attached
            self._line_cache.clear()
            self.refresh()

    def marked(self, row: int) -> list[tuple[int, int]]:
        """Labels, and where line `row` mentions files that are there."""
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

    def send_now(self) -> None:
        """As Enter does."""
        self._submit()

    def _submit(self) -> None:
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
        names_server = any(mentioned_server(mention.path) for mention in mentions(shown))
        servers = self._tools() if self._tools is not None and names_server else None
        sees = self._sees()
        self.read_only = True
        self._reading_timer = self.set_timer(
            _FETCHING if "@http" in shown or servers is not None else _READING, self._give_up_reading
        )

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
            self.post_message(self.Read(number, result))

        Thread(target=read, name="attachments", daemon=True).start()

    @on(Read)
    def _files_read(self, message: Read) -> None:
        message.stop()
        if message.number == self._reading and self.read_only:
            self._end_reading()
            self._send(message.result)

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
        """Go on writing in $VISUAL or $EDITOR. What is saved there comes back."""
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
