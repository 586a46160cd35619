"""What `chatterm serve` does: starts the engine process, watches it, and runs the web API beside it."""

import subprocess
import sys
from contextlib import suppress

import msgspec

from chatterm.backends.backend import EngineError
from chatterm.server.engine_process import ProcessOptions

_LEAVE = 20.0
"""Seconds that it gets to end."""


class EngineChild:
    """The engine process, while it lives. It ends when this process does."""

    def __init__(self, options: ProcessOptions) -> None:
        """Returns when it listens. Raises EngineError where it does not."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chatterm.server.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl+C in the terminal is for whoever started it, who ends it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # what it says tells more
            self._process.stdin.write(msgspec.json.encode(options) + b"\n")
            self._process.stdin.flush()
        said = self._process.stdout.readline().decode("utf-8", "replace").strip()
        if said != "ready":
            self._process.kill()
            self._process.wait()
            raise EngineError(
                said.removeprefix("failed ") or "The engine process has ended while it started."
            )

    @property
    def code(self) -> int | None:
        """Its exit code; None while it lives."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutError."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def end(self) -> None:
        """Have it end: its clients are told. One that does not is killed."""
        self._process.terminate()
        try:
            self.wait(_LEAVE)
        except TimeoutError:
            self._process.kill()
            self._process.wait()
