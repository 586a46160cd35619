"""What a person sees of the chat while looking elsewhere: the window's title, and that a long answer is there."""

import os
from typing import Any

from textual.app import App

from chatterm.conversation.figures import Live
from chatterm.conversation.turn import RunningTurn
from chatterm.screens.chat.parts import ScreenPart
from chatterm.terminal.driver import TitledDriver
from chatterm.terminal.title import Notify, attention

LONG = 5.0
"""Seconds of an answer that somebody may have left alone."""
_STATES = {"absent": "no model", "reading": "answering", "thinking": "answering"}


class Presence(ScreenPart):
    notify: Notify = "bell"

    def show(self, live: Live) -> None:
        """The window's title says the model and the state."""
        name = live.info.name if live.info is not None else live.model
        if (driver := titled_driver(self.screen.app)) is not None:
            driver.show_title(f"{_STATES.get(live.phase, live.phase)} - {name} - chatterm")

    def answered(self, turn: RunningTurn | None, now: float) -> None:
        """An answer has ended by itself at `now`, by `time.monotonic()`."""
        if turn is None or turn.is_stopping or now - turn.started < LONG or self.screen.app.app_focus:
            return
        driver = titled_driver(self.screen.app)
        if driver is not None:
            said = f"Answer finished: {self.conversation.title}"
            driver.write(attention(self.notify, said, os.environ))


def titled_driver(app: App[Any]) -> TitledDriver | None:
    """The driver of a terminal that stands in a window; None without one."""
    driver = app._driver
    return driver if isinstance(driver, TitledDriver) else None
