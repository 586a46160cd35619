"""Compiles kernels ahead in other processes, as many at once as there are cores.

The parameters that a kernel is compiled for are known only when it is launched. So launches are recorded: a kernel that
is not compiled yet is neither compiled nor launched, but noted. Other processes compile the noted kernels into Triton's
cache on disk, where the next launch finds them.
"""

# mypy: disable-error-code="no-untyped-call"
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import triton
from triton import knobs

from models.system import own_group

LONGEST_S = 120.0
"""Seconds after which a process is killed that is still compiling the same kernel."""
_RECORDING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Launch:
    """The parameters that a kernel is compiled for, as bytes that another process reads."""

    name: str
    """Module and name of the kernel."""
    pickled: bytes


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Make this thread launch only compiled kernels; the list receives the rest. Other threads compile as usual."""
    found: list[Launch] = []
    thread = threading.get_ident()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        target = triton.runtime.driver.active.get_current_target()
        options = json.loads(compile["specialization_data"])["options"]
        asked = (
            fn.module,
            fn.name,
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
            (target.backend, target.arch, target.warp_size),
        )
        found.append(Launch(f"{fn.module}.{fn.name}", pickle.dumps(asked)))
        return True

    with _RECORDING:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = note
        try:
            yield found
        finally:
            knobs.runtime.jit_cache_hook = before


class Compilers:
    """Processes that compile. They have the lowest priority, and end when this is closed."""

    def __init__(self, processes: int) -> None:
        self._pool = ThreadPoolExecutor(processes, thread_name_prefix="compile")
        self._own = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []
        self._door = threading.Lock()
        self._closed = False
        self._asked: dict[Launch, Future[str | None]] = {}

    def compile(self, launch: Launch) -> Future[str | None]:
        """Start compiling, unless it was started before. The result is the reason of a failure, or None."""
        with self._door:
            if launch not in self._asked:
                self._asked[launch] = self._pool.submit(self._run, launch)
            return self._asked[launch]

    def close(self) -> None:
        """Kill the processes, whatever they are doing."""
        with self._door:
            self._closed = True
            for process in self._all:
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for process in self._all:
            process.wait()

    def _run(self, launch: Launch) -> str | None:
        try:
            process = self._process()
            assert process.stdin is not None
            assert process.stdout is not None
            late = threading.Timer(LONGEST_S, process.kill)
            late.start()
            try:
                process.stdin.write(len(launch.pickled).to_bytes(8, "little") + launch.pickled)
                process.stdin.flush()
                answer = process.stdout.readline()
            finally:
                late.cancel()
        except OSError as error:
            answer = f"{error}\n".encode()
        if not answer.endswith(b"\n"):
            self._own.process = None
            return "the process that compiles ended"
        return answer.decode(errors="replace").strip() or None

    def _process(self) -> "subprocess.Popen[bytes]":
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            with self._door:
                if self._closed:
                    raise OSError("closed")
                process = subprocess.Popen(
                    [sys.executable, "-c", f"from {__name__} import serve; serve()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    **own_group(),
                )
                self._all.append(process)
            self._own.process = process
        return process


def serve() -> None:
    """Compile each launch read from standard input; answer with a line on standard output, empty on success."""
    with suppress(OSError):
        os.nice(19)
    source, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not mix with the answers
    while head := source.read(8):
        pickled = source.read(int.from_bytes(head, "little"))
        try:
            compile_launch(pickled)
            line = ""
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything; the others go on
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        out.write(line.encode() + b"\n")
        out.flush()


def compile_launch(pickled: bytes) -> Any:
    """Compile a recorded launch, or load it from Triton's cache. Raises the compiler's errors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    module, name, signature, constants, attributes, options, target = pickle.loads(pickled)
    kernel = getattr(import_module(module), name)
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options)
