"""The base of the chat screen: what its commands work with, and how messages and entries are shown."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from textual.screen import ModalScreen, Screen

from chatterm.backends import worker
from chatterm.backends.backend import Backend, EngineError, Exchange, ModelChoice, ModelError, ModelInfo
from chatterm.backends.remote.address import Remote
from chatterm.commands.reports import undone_text
from chatterm.conversation.entries import Entry, NoticeEntry
from chatterm.conversation.screen_conversation import ScreenConversation
from chatterm.conversation.session_tree import SessionTree
from chatterm.settings.settings import Settings
from chatterm.terminal import clipboard
from chatterm.terminal.error_log import error_line, write_down
from chatterm.terminal.sanitize import cleaned, one_line
from chatterm.widgets.composer import Composer
from chatterm.widgets.message_hint import message_hint
from chatterm.widgets.remarks import Remarks
from chatterm.widgets.side_panel import SidePanel
from chatterm.widgets.slices import in_slices
from chatterm.widgets.status_line import StatusLine
from chatterm.widgets.transcript import Transcript
from chatterm.widgets.welcome import WelcomeView

T = TypeVar("T")

_EDITING = "Enter sends this as a new branch; Esc leaves the message unchanged"
_EDITING_MEANWHILE = "Esc stops the answer; then Enter sends this as a new branch"
_WIDE = 110
"""Columns from which the stats panel is shown beside the conversation."""


def problem_text(error: Exception) -> str:
    """Return a one-line message for an error. Log unexpected errors."""
    if isinstance(error, EngineError | ModelError):
        return one_line(str(error))
    if isinstance(error, OSError):
        return one_line(f"{error.strerror or error}: {error.filename or ''}".rstrip(": ") + ".")
    return f"{error_line(error)} The chat continues. {write_down(error)}"


def _near_servers() -> list[ModelChoice]:
    from chatterm.backends.remote.server_scan import local_choices

    return local_choices()


def _named_servers(remotes: Mapping[str, Remote]) -> list[ModelChoice]:
    from chatterm.backends.remote.server_scan import named_choices

    return named_choices(remotes)


def check_model(remotes: Mapping[str, Remote], name: str) -> None:
    """Raise EngineError or ModelError if no model has this name. Reads the disk but asks no server."""
    from chatterm.backends.remote.address import found
    from models.hub.sources import parse

    if found(name, remotes) is None:
        parse(name)


IN_THREAD = "in_thread"
"""The name of the workers of `in_thread`."""


class ChatBase(Screen[None]):
    """Implements `chatterm.conversation.view.View`. The widgets exist once it is mounted."""

    transcript: Transcript
    composer: Composer
    panel: SidePanel
    remarks: Remarks
    status: StatusLine
    welcome: WelcomeView

    def __init__(
        self, backend: Backend, thread: worker.Worker, saved: SessionTree, settings: Settings
    ) -> None:
        super().__init__()
        self.backend = backend
        self.worker_thread = thread
        self.submit = thread.submit
        self.settings = settings
        self.conversation = ScreenConversation(backend, thread, saved, self)
        self.conversation.show_thinking = settings.screen.thinking_open
        self.copy_with: Callable[[str], str] = clipboard.copy
        self.looks: tuple[Callable[[], list[ModelChoice]], ...] = (
            _near_servers,
            partial(_named_servers, settings.remotes),
        )
        """Functions that find models on servers; each is called in a thread of its own."""
        self.check_model: Callable[[str], None] = partial(check_model, settings.remotes)
        self.begun = monotonic()
        self.is_loading = True
        self.info: ModelInfo | None = None
        self.has_failed = False
        """Whether something failed since the model was loaded, so that loading it again may help."""
        self.editing: Exchange | None = None
        """The message being edited."""
        self.hint_until = 0.0
        self._doing: list[str] = []
        """Descriptions of the work running in threads, latest last."""
        self.wanted_model = one_line(backend.model, limit=200)
        self.panel_wanted = settings.screen.panel_wanted
        self.set_class(settings.screen.tint, "-tinted")

    def show_panel(self, wanted: bool | None) -> None:
        self.panel_wanted = wanted
        self.place_panel(self.size.width)
        if wanted and not self.panel.display:
            self.hint("The stats panel needs 70 columns; see the line below instead.", 3.0)

    def place_panel(self, width: int) -> None:
        room = width >= _WIDE if self.panel_wanted is None else self.panel_wanted and width >= 70
        self.panel.display = room
        self.status.keys_only(room)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being loaded or answered and no message waits."""
        return not self.is_loading and not self.conversation.is_busy

    @property
    def model_name(self) -> str:
        return self.info.name if self.info else self.wanted_model

    def in_thread(self, work: Callable[[], T], then: Callable[[T], None], doing: str = "") -> None:
        """Run blocking `work` in a thread, then `then` here; report errors. `doing` is shown until then."""
        self._go_on(lambda: asyncio.to_thread(work), then, doing)

    def in_slices(self, work: Generator[None, None, T], then: Callable[[T], None]) -> None:
        """Run `work` on this thread, a few milliseconds at a time, then `then`, as `in_thread` does."""
        self._go_on(lambda: in_slices(work), then)

    def _go_on(self, work: Callable[[], Awaitable[T]], then: Callable[[T], None], doing: str = "") -> None:
        async def go() -> None:
            try:
                found = await work()
                if self.remarks.is_attached:
                    then(found)
            except Exception as error:  # noqa: BLE001 (the chat must go on)
                if self.remarks.is_attached:
                    self.say(problem_text(error), "error")
            finally:
                if doing:
                    self._doing.remove(doing)
                    if self.remarks.is_attached:
                        self.show_standing_hint()

        if doing:
            self._doing.append(doing)
            self.hint_until = 0.0
            self.show_standing_hint()
        self.run_worker(go(), name=IN_THREAD)

    def attempt(self, action: Callable[[], None]) -> None:
        """Run `action`; report errors."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 (as above)
            self.say(problem_text(error), "error")

    def switch_model(self, name: str) -> None:
        self.conversation.stop()
        self.is_loading, self.wanted_model = True, one_line(name, limit=200)
        self.conversation.forget()
        self.submit(Backend.switch, name)

    def ask(self, screen: ModalScreen[T | None], then: Callable[[T], None]) -> None:
        """Open `screen` over the conversation, then call `then` with its result, unless that is None."""

        def closed(found: T | None) -> None:
            if found is not None:
                self.attempt(partial(then, found))

        self.app.push_screen(screen, closed)

    def use_sampling(self, chosen: dict[str, Any]) -> None:
        """Use these sampling settings for the conversation from the next answer on."""
        self.conversation.sampling = dict(chosen)
        sampling = {**self.settings.sampling.given(), **chosen}
        self.submit(Backend.configure, {"sampling": sampling})

    def copy_text(self, text: str) -> None:
        """Copy to the terminal's clipboard and the system's. Raise EngineError if there is no text."""
        if not text:
            raise EngineError("There is nothing to copy: the message is empty.")

        def put() -> str:
            self.app.copy_to_clipboard(text.encode("utf-8", "replace").decode())
            return self.copy_with(text)

        def tell(program: str) -> None:
            self.hint(clipboard.copied_text(text, program), 3.0)

        self.in_thread(put, tell)

    # --- messages ---

    def say(self, text: str, kind: str = "notice") -> None:
        """Show a remark above the composer: an error, or a notice of what was done."""
        self.remarks.say(text, kind, self.composer.text, monotonic())

    def tell(self, text: str) -> None:
        """Add a notice to the conversation itself."""
        self.add(NoticeEntry(text))

    def hint(self, text: str, seconds: float) -> None:
        """Show a hint below the composer for some seconds."""
        self.hint_until = monotonic() + seconds
        self.status.hint(text)

    def show_standing_hint(self) -> None:
        if self.hint_until:
            return
        entry = self.transcript.selected
        selected = message_hint(entry, self.size.width - 6) if entry is not None else ""
        editing = _EDITING_MEANWHILE if self.conversation.is_busy else _EDITING
        writing = undone_text(len(self.conversation.undone)) if self.editing is None else editing
        self.status.hint(selected or (self._doing[-1] if self._doing else writing))

    # --- display ---

    def add(self, entry: Entry) -> None:
        self._open_transcript()
        self.transcript.add(entry)
        self.transcript.look_at(entry)

    def show_path(self, entries: Sequence[Entry], above: Entry | None = None) -> None:
        if entries:
            self._open_transcript()
        self.transcript.show_path(entries, above)
        if (turn := self.conversation.turn) is not None:
            if not turn.has_begun and turn.answer in entries:
                self.transcript.end_with(turn.answer)
            self.transcript.follow()
        self.show_standing_hint()

    def _open_transcript(self) -> None:
        self.welcome.display = False
        self.transcript.display = True

    def change(self, work: Generator[None, None, None]) -> None:
        self.in_slices(work, lambda _: self.transcript.update())

    def give_back(self, text: str) -> None:
        self.composer.put_back(cleaned(text))

    # --- selection ---

    def select(self, entry: Entry) -> None:
        self.transcript.select(entry)
        self.transcript.focus()
        self.hint_until = 0.0
        self.show_standing_hint()

    def back_to_composer(self) -> None:
        self.transcript.select(None)
        self.set_focus(self.composer)
        self.show_standing_hint()
