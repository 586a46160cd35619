"""The Textual application."""

import gc
import os
import sys
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from chatterm.backend import Backend
from chatterm.driver import terminal_driver
from chatterm.palette import SlashCommands
from chatterm.screens.chat import ChatScreen
from chatterm.themes import DEFAULT_THEME, STYLESHEET, load_theme
from chatterm.worker import Worker


class ChatApp(App[int]):
    """One chat. The worker outlives the screen by the time it needs to end."""

    CSS_PATH = STYLESHEET
    COMMANDS = {SlashCommands}  # noqa: RUF012 (Textual declares it so)
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "Quit", show=False, priority=True)]
    TITLE = "chatterm"

    def __init__(self, backend: Backend, *, theme: str = DEFAULT_THEME) -> None:
        chosen = load_theme(theme)
        super().__init__(driver_class=terminal_driver())
        self.worker = Worker(backend)
        self.chat = ChatScreen(backend, self.worker)
        self.register_theme(chosen)
        self.theme = theme

    def on_mount(self) -> None:
        self.push_screen(self.chat)

    async def action_quit(self) -> None:
        self.exit(0)


def run_app(backend: Backend, *, theme: str | None) -> int:
    """Chat until the person leaves; the exit code. Raises EngineError for a theme that does not exist.

    Where the backend cannot be interrupted (it is importing or reading a model) the process ends here and now:
    the terminal is restored already, and nobody should wait for a model that is not wanted any more.
    """
    app = ChatApp(backend, theme=theme or DEFAULT_THEME)
    ended = False
    gc.disable()  # until the first frame stands: collecting takes a fifth of the time to it
    try:
        app.run()
    finally:
        gc.enable()
        ended = app.worker.close()
    code = app.return_code or 0
    if not ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
