"""The engine process, seen from whoever starts it: `chatterm serve`, or a `chatterm run` that leaves it behind."""

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec
from msgspec import Struct

from chatterm.backends.backend import ChatOptions, EngineError
from chatterm.ipc.runtime import ServerRunsError, is_supported

_LEAVE = 20.0
"""Seconds that an engine process gets to end."""


class ProcessOptions(Struct, frozen=True):
    """What the engine process is started with."""

    options: ChatOptions
    keep_alive_s: float | None = None
    """Seconds that a model stays once nobody uses it; None: for ever."""
    ends_unused: bool = False
    """It ends once whoever started it has let go, nobody is attached, and no model is loaded; else with its starter."""


class EngineChild:
    """The engine process, while it lives. It ends when this process does, unless it `ends_unused`."""

    def __init__(self, options: ProcessOptions) -> None:
        """Returns when it listens. Raises ServerRunsError where there is one already, EngineError where it fails."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chatterm.server.process.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It outlives the terminal that it would write to, and must hold no folder of it.
            stderr=subprocess.DEVNULL if options.ends_unused else None,
            cwd="/" if options.ends_unused else None,
            start_new_session=True,  # Ctrl+C in the terminal is for whoever started it, who ends it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with suppress(OSError):  # what it says tells more
                self._process.stdin.write(msgspec.json.encode(options) + b"\n")
                self._process.stdin.flush()
            said = self._process.stdout.readline().decode("utf-8", "replace").strip()
        except BaseException:
            self._kill()
            raise
        if said != "ready":
            self._kill()
            kind, _, why = said.partition(" ")
            if kind == "taken":
                raise ServerRunsError(why)
            raise EngineError(why or "The engine process has ended while it started.")

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return self._process.wait()

    def let_go(self) -> None:
        """It lives on without its starter."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        threading.Thread(target=self._process.wait, name="engine-process", daemon=True).start()

    def end(self) -> None:
        """Have it end: its clients are told. One that does not is killed."""
        self._process.terminate()
        try:
            self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


def left_behind(options: ChatOptions, keep_alive_s: float | None) -> Callable[[], None]:
    """Start an engine process that stays for other terminals; returns what lets go of it.

    Its models are loaded as `options` say. Raises as EngineChild does.
    """
    if not is_supported():
        raise EngineError("This system has no sockets for an engine process.")
    own = replace(options, system=None, sampling={}, constraint=None, streams=1)
    return EngineChild(ProcessOptions(own, keep_alive_s, ends_unused=True)).let_go
