"""Starts the engine process: for `chatterm serve`, or for a `chatterm run` that leaves it behind."""

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec
from msgspec import Struct

from chatterm.backends.backend import ChatOptions, EngineError
from chatterm.ipc.runtime import ServerRunsError
from models.system import own_group

_LEAVE = 20.0
"""Seconds that an engine process has to end before it is killed."""


class ProcessOptions(Struct, frozen=True):
    """The options of the engine process."""

    options: ChatOptions
    keep_alive_s: float | None = None
    """Seconds that an unused model stays loaded; None: forever."""
    ends_unused: bool = False
    """Whether it ends once detached, with no clients and no loaded model; otherwise it ends with its parent."""


class EngineChild:
    """A running engine process. It ends when this process does, unless `ends_unused` is set."""

    def __init__(self, options: ProcessOptions) -> None:
        """Start the process and wait until it listens. Raises ServerRunsError if one exists, and EngineError."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chatterm.server.process.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It outlives the terminal, so it must not write to it or keep a folder of it in use.
            stderr=subprocess.DEVNULL if options.ends_unused else None,
            cwd="/" if options.ends_unused else None,
            **own_group(),  # Ctrl+C in the terminal goes to the parent, which ends it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with suppress(OSError):  # the error that it prints tells more
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
            raise EngineError(why or "The engine process exited during startup.")

    def wait(self) -> int:
        """Wait for the process to end; return its exit code."""
        return self._process.wait()

    def let_go(self) -> None:
        """Detach from the process, which keeps running."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        threading.Thread(target=self._process.wait, name="engine-process", daemon=True).start()

    def end(self) -> None:
        """Terminate the process, which tells its clients; kill it if it does not end in time."""
        if sys.platform == "win32":  # there it would be killed
            assert self._process.stdin is not None
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


def left_behind(options: ChatOptions, keep_alive_s: float | None) -> Callable[[], None]:
    """Start an engine process that stays for other terminals; return the function that detaches from it.

    Its models are loaded with `options`. Raises as EngineChild does.
    """
    own = replace(options, system=None, sampling={}, constraint=None, streams=1)
    return EngineChild(ProcessOptions(own, keep_alive_s, ends_unused=True)).let_go
