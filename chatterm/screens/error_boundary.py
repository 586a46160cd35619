"""The error boundary: an unexpected error is reported in one line and the application goes on."""

import asyncio
import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Any

from textual import events
from textual._context import active_message_pump
from textual.app import ScreenStackError
from textual.dom import DOMNode, NoScreen
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.worker import WorkerFailed

from chatterm.screens.themed_app import ThemedApp
from chatterm.terminal.error_log import error_line, write_down

_MOST, _WITHIN = 10, 10.0
"""Errors within this many seconds after which the application gives up."""

_PATIENCE = 5.0
"""Seconds after which a key goes to the screen, whatever that is doing."""
_LONG = 0.004
"""Seconds of dealing with one message after which others get their turn before the widget's next one."""


class GuardedApp(ThemedApp):
    """Survives errors of handlers, timers and drawing, where Textual ends with a traceback or leaves a widget dead.

    A failing screen above the main one is closed. If errors come too fast, or before there is a main screen, the
    application ends with one line.
    """

    def __init__(self, **look: Any) -> None:
        super().__init__(**look)
        self.unforeseen: list[str] = []
        """The errors reported, latest last."""
        self._error_times: deque[float] = deque(maxlen=_MOST)
        self.last_words = ""
        """Why the application gave up, in one line, for the caller to print."""
        self._is_leaving = False
        self._failed: Screen[Any] | None = None
        """The latest screen that failed and is being closed."""

    # --- for the application ---

    @property
    def main_screen(self) -> Screen[Any] | None:
        """The screen that shows errors; None before it is ready."""
        raise NotImplementedError

    def save_all(self) -> None:
        """Save everything unsaved."""

    def tell(self, line: str) -> None:
        """Show the line on the main screen."""

    # --- keys ---

    async def on_event(self, event: events.Event) -> None:
        """Hold keys and pastes until the screen takes them and everything caused by the previous key is done."""
        if not isinstance(event, events.Key | events.Paste) or not self.screen_stack:
            return await super().on_event(event)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                screen = None
                while screen is not self.screen:  # another one may come with what is being done
                    screen = self.screen
                    await _dealt_with(screen)
        return await super().on_event(event)

    # --- sources of errors ---

    def _register_child(self, parent: DOMNode, child: Widget, before: int | None, after: int | None) -> None:
        self._guard(child)
        super()._register_child(parent, child, before, after)

    def _start_widget(self, parent: Widget, widget: Widget) -> None:
        self._guard(widget)  # scroll bars
        super()._start_widget(parent, widget)

    def _guard(self, widget: Widget) -> None:
        """Catch the errors of a widget's handlers, because Textual would end its message loop."""
        if "_dispatch_message" in vars(widget):
            return
        dispatch = widget._dispatch_message

        async def guarded(message: Message) -> None:
            began = monotonic()
            try:
                await dispatch(message)
            except Exception as error:  # noqa: BLE001 (the widget must live on)
                self._handle_exception(error)
            if monotonic() - began > _LONG:
                await asyncio.sleep(0)

        widget._dispatch_message = guarded  # type: ignore[method-assign]

    async def _dispatch_message(self, message: Message) -> None:
        try:
            await super()._dispatch_message(message)
        except Exception as error:
            if not self._running:
                raise  # during startup: Textual ends the application, with our line
            self._handle_exception(error)

    def thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """Handle an error of a thread; set as `threading.excepthook`."""
        if isinstance(failed.exc_value, Exception):
            self.call_later(self._handle_exception, failed.exc_value)

    # --- handling errors ---

    def _handle_exception(self, error: Exception) -> None:
        if isinstance(error, WorkerFailed) and isinstance(error.error, Exception):
            error = error.error
        has_ended = self.main_screen is not None and not self.screen_stack
        if has_ended and isinstance(error, ScreenStackError | NoScreen):
            return  # what came late asked for the screen
        pump = active_message_pump.get(None)
        failed = pump.screen if isinstance(pump, Widget) and pump.is_attached else None
        if self._is_leaving or (failed is not None and failed is self._failed):
            write_down(error)
            return
        now = monotonic()
        too_fast = len(self._error_times) == _MOST and now - self._error_times[0] < _WITHIN
        self._error_times.append(now)
        what = error_line(error)
        is_new = self.unforeseen[-1:] != [what]
        where = write_down(error) if is_new else ""
        self.unforeseen.append(what)
        if too_fast or self.main_screen is None or not self._running:
            self._leave(error, what)
            return
        self._failed = None if failed is self.main_screen else failed
        line = f"{what} Your conversation and your draft are saved. {where}" if is_new else ""
        self.call_later(self._go_on, failed, line)

    def _go_on(self, failed: Screen[Any] | None, line: str) -> None:
        main = self.main_screen
        if failed is not None and failed is not main and failed in self.screen_stack:
            while self.screen is not main:
                top = self.screen
                try:
                    top.dismiss(None)
                finally:
                    if self.screen is top:
                        self.pop_screen()
        self.save_all()
        if line:
            self.tell(line)
        self.screen.refresh()  # the failed drawing may be incomplete

    def _leave(self, error: Exception, what: str) -> None:
        self._is_leaving = True
        try:
            self.save_all()
        except Exception as problem:  # noqa: BLE001 (it exits in any case)
            write_down(problem)
        self.last_words = (
            f"chatterm: {what} chatterm has to close; your conversation is saved. {write_down(error)}"
        )
        self.exit(1, return_code=1)


async def _dealt_with(screen: Screen[Any]) -> None:
    """Wait until `screen` and the focused widgets have processed a key and two generations of resulting messages."""
    for _ in range(2):
        focused = screen.focused.ancestors_with_self if screen.focused is not None else []
        for pump in (screen, *focused):
            done = asyncio.Event()
            if isinstance(pump, Widget) and pump.call_later(done.set):
                await done.wait()
