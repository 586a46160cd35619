"""The Textual application."""

import os

os.environ.setdefault("TEXTUAL_FPS", "120")  # Textual reads it when it is imported: a key waits 8 ms, not 16

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding, BindingType

from chatterm.backends.backend import Backend, EngineError
from chatterm.backends.threads import Threads
from chatterm.backends.worker import Worker
from chatterm.conversation.session_tree import SessionTree
from chatterm.screens.chat.palette import Palette, SlashCommands
from chatterm.screens.chat.screen import ChatScreen
from chatterm.screens.error_boundary import GuardedApp
from chatterm.screens.themed_app import Terminal, this_terminal
from chatterm.settings.settings import Settings
from chatterm.settings.themes import STYLESHEET
from chatterm.terminal.signals import ENDING, heeded

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore


_MOMENT_S = 1.0
"""Seconds after which a person is told what is being waited for."""
_DISK_S = 1.0
"""Seconds to wait for the disk before printing how to continue; if it takes longer, nothing is printed."""
_AGAIN_S = 0.01
"""Seconds between checks whether the chat is mounted."""


_LEFT = "chatterm: A disk or a program does not answer; what was being read or written there is left."


class ChatApp(GuardedApp):
    """One chat. The worker and the store outlive the screen until they have ended."""

    CSS_PATH = STYLESHEET
    COMMANDS = {SlashCommands}  # noqa: RUF012 (Textual declares it so)
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "Quit", show=False, priority=True)]
    TITLE = "chatterm"

    def __init__(
        self,
        backend: Backend,
        *,
        theme: str | None = None,
        settings: Settings | None = None,
        store: "SessionStore | None" = None,
        session: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        tools: str = "",
        terminal: Terminal | None = None,
    ) -> None:
        """`store` saves the conversation (None: it is not saved), `session` is the one in it to continue.

        `sampling` is what was chosen for this chat, `tools` what `/tools` is to switch on. Raises SettingsError for a
        theme that does not exist.
        """
        settings = settings or Settings()
        super().__init__(
            theme=theme or settings.screen.theme, glyphs=settings.screen.glyphs, terminal=terminal
        )
        self.worker = Worker(backend)
        self.threads = Threads()
        self._on_interrupt: Any = None
        """The earlier handler of SIGINT; None if it was not changed."""
        self.chat = ChatScreen(backend, self.worker, SessionTree(store, session), settings)
        self.chat.conversation.sampling = dict(sampling or {})
        self.chat.tooling.wanted = tools

    def on_load(self) -> None:
        """Install signal handlers: from here on the terminal is changed, and a signal to end must restore it."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self.threads)

        def interrupted(number: int, frame: object) -> None:
            loop.call_soon_threadsafe(self._end_by, number)

        with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not in the main thread
            for number in heeded("SIGINT"):  # not by the loop, which would also get those meant for an editor
                self._on_interrupt = signal.signal(number, interrupted)
            for number in heeded(*ENDING):
                loop.add_signal_handler(number, self._end_by, number)

    def _end_by(self, number: int) -> None:
        if self.chat.is_mounted:
            self.exit(return_code=128 + number)
        else:  # Textual cannot end a screen that it has not composed yet
            asyncio.get_running_loop().call_later(_AGAIN_S, self._end_by, number)

    def on_mount(self) -> None:
        self.push_screen(self.chat)

    def action_command_palette(self) -> None:
        """Open the command palette, but only over the conversation, to which its commands apply."""
        if self.screen is self.chat:
            self.push_screen(Palette(id="--command-palette"))

    @property
    def main_screen(self) -> ChatScreen | None:
        return self.chat if self.chat.is_mounted else None

    def save_all(self) -> None:
        if self.chat.is_mounted:
            self.chat.writing.keep_draft(self.chat.composer.full_text, leaving=True)

    def on_unmount(self) -> None:
        if self._on_interrupt is not None:
            signal.signal(signal.SIGINT, self._on_interrupt)  # this loop ends
        if (store := self.chat.conversation.saved.store) is not None:
            store.release()  # or threads waiting for it would delay the exit

    def tell(self, line: str) -> None:
        self.chat.say(line, "error")

    async def action_quit(self) -> None:
        self.exit(0)


def way_back(store: "SessionStore | None", session: str | None) -> str:
    """Return the text on how to continue a session; "" if nothing of it is saved. Waits for the disk."""
    info = store.info(session) if store is not None and session is not None and not store.problem else None
    if store is None or info is None or not info.exchanges:
        return ""
    latest = store.latest()
    way = f"chatterm run --session {info.id}"
    if latest is not None and latest.id == info.id:
        way = f"chatterm run --continue\n  or, at any later time: {way}"
    return f"Saved: {info.title}\n  To continue: {way}"


def _tell_how_to_come_back(store: "SessionStore | None", session: str | None) -> None:
    with suppress(OSError, EngineError):  # the terminal may be gone, and the disk may fail
        if store is not None:
            store.flush(_DISK_S)
        if text := way_back(store, session):
            print(text, flush=True)


@contextmanager
def _told_if_slow(line: str) -> Iterator[None]:
    """Print `line`, which says what is waited for, if the block takes longer than a moment."""
    timer = threading.Timer(_MOMENT_S, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_app(
    backend: Backend,
    *,
    theme: str | None,
    settings: Settings | None = None,
    session: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    tools: str = "",
) -> int:
    """Run the chat until the person leaves; return the exit code. Raises EngineError for an unknown theme.

    If the backend cannot be interrupted (it is importing or loading a model), the process exits at once: the terminal
    is already restored, and nobody should wait for a model that is no longer wanted.
    """
    from chatterm.sessions.store import SessionStore

    settings = settings or Settings()
    store = SessionStore.open() if settings.sessions.save else None
    ended = False
    gc.disable()  # until the first frame is drawn: collection takes a fifth of the time to it
    try:
        app = ChatApp(
            backend,
            theme=theme,
            settings=settings,
            store=store,
            session=session,
            sampling=sampling,
            tools=tools,
            terminal=this_terminal(),
        )
        threading.excepthook = app.thread_failed
        app.run()
        _tell_how_to_come_back(store, app.chat.conversation.saved.session)
        ended = app.worker.close()
        if app.threads.are_left:
            print(_LEFT, file=sys.stderr)
        if app.last_words:
            print(app.last_words, file=sys.stderr)
    finally:
        threading.excepthook = threading.__excepthook__
        gc.enable()
        with _told_if_slow("Saving the conversation…"):
            is_saved = store is None or store.close()
        if store is not None and not is_saved:
            print(f"chatterm: {store.farewell}", file=sys.stderr)
    code = app.return_code or 0
    if not ended:
        with suppress(OSError):  # the terminal may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code
