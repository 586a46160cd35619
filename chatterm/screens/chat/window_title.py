"""The window title, and the notification that a long answer has finished."""

import os
from typing import Any

from textual.app import App

from chatterm.conversation.figures import Live
from chatterm.conversation.turn import RunningTurn
from chatterm.screens.chat.parts import ScreenPart
from chatterm.terminal.driver import OwnDriver
from chatterm.terminal.title import Notify, attention

LONG = 5.0
"""Seconds of an answer from which its end is notified."""
_STATES = {"absent": "no model", "reading": "answering", "thinking": "answering"}


class Presence(ScreenPart):
    notify: Notify = "bell"

    def show(self, live: Live) -> None:
        """Show the model and the state in the window title."""
        name = live.info.name if live.info is not None else live.model
        if (driver := titled_driver(self.screen.app)) is not None:
            driver.show_title(f"{_STATES.get(live.phase, live.phase)} - {name} - chatterm")

    def answered(self, turn: RunningTurn | None, now: float) -> None:
        """Notify the person of a long answer that ended by itself at `now` (`time.monotonic()`), unless focused."""
        if turn is None or turn.is_stopping or now - turn.started < LONG or self.screen.app.app_focus:
            return
        driver = titled_driver(self.screen.app)
        if driver is not None:
            said = f"Answer finished: {self.conversation.title}"
            driver.write(attention(self.notify, said, os.environ))


def titled_driver(app: App[Any]) -> OwnDriver | None:
    """Return the driver of a terminal with a window title; None if there is none."""
    driver = app._driver
    return driver if isinstance(driver, OwnDriver) else None
