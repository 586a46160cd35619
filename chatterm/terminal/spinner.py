"""A spinner on standard error, for a user who waits at a terminal."""

import os
import shutil
from threading import Event, Thread
from types import TracebackType
from typing import TextIO

_FRAMES, _PLAIN_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
_DELAY = 0.3
"""Seconds after which a wait is worth showing."""
_FRAME = 0.1


def has_colour(stream: TextIO) -> bool:
    """Return whether escape codes may be written to the stream."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("dumb", "unknown")
    return stream.isatty() and not plain


class Spinner:
    """A context manager. The spinner turns from a moment after entry until `stop`, which erases it.

    If no escape codes may be written, nothing is shown.
    """

    def __init__(self, err: TextIO, text: str, delay: float = _DELAY) -> None:
        self._err = err
        self.text = text
        """The text beside the spinner; it may be changed."""
        self._delay = delay
        self._stopped = Event()
        self._thread = Thread(target=self._turn, name="spinner", daemon=True)
        self.turns = has_colour(err)

    def __enter__(self) -> "Spinner":
        if self.turns:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Erase the spinner; once this returns, nothing more is written. Stopping twice is fine."""
        self._stopped.set()
        if self.turns:
            self.turns = False
            self._thread.join()

    def _turn(self) -> None:
        if self._stopped.wait(self._delay):
            return
        unicode = "utf" in (getattr(self._err, "encoding", None) or "utf-8").lower()
        frames = _FRAMES if unicode else _PLAIN_FRAMES
        number = 0
        while True:
            room = max(shutil.get_terminal_size().columns - 3, 0)  # a line that wraps could not be cleared
            self._put(f"\r{frames[number % len(frames)]} {self.text[:room]}\x1b[K")
            number += 1
            if self._stopped.wait(_FRAME):
                break
        self._put("\r\x1b[K")

    def _put(self, text: str) -> None:
        self._err.write(text)
        self._err.flush()
