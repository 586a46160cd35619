"""The important ways of chatterm in a process that lacks what Python does not have on Windows.

    python tests/without_posix.py MODEL_FOLDER EMPTY_FOLDER

On Windows it runs as it is: nothing has to be taken away there. Elsewhere `sys.platform` stays, because the standard
library relies on it; what is taken away are modules, functions and the files of Linux. The result is a line of JSON.
"""

import asyncio
import builtins
import contextlib
import ctypes
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODULES = "fcntl termios tty pty pwd grp resource readline curses syslog posix triton"
OS = """fork forkpty getuid geteuid getgid getegid getpgid setsid setpgid killpg sysconf nice chown fchown lchown fchmod
pread preadv pwrite pwritev posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity sched_yield uname wait3
wait4 waitid mkfifo O_NONBLOCK O_NOFOLLOW O_CLOEXEC O_DIRECTORY O_SYNC O_DSYNC O_NOCTTY getloadavg openpty ttyname
RWF_NOWAIT memfd_create sendfile copy_file_range eventfd confstr register_at_fork setpriority
getpriority tcgetpgrp tcsetpgrp ctermid"""
LIBRARIES = """sqlite3 subprocess tempfile multiprocessing torch filelock textual.app typer httpx jinja2 tokenizers
rich.console safetensors.torch gguf uvicorn mcp acp"""
SIGNALS = """SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGPROF SIGPIPE SIGCHLD SIGCONT SIGSTOP SIGTSTP SIGTTIN
SIGTTOU SIGWINCH setitimer alarm pthread_sigmask sigwait siginterrupt"""


class Missing:
    """Finds none of MODULES."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in MODULES.split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def take_away() -> None:
    """Remove what Windows lacks, once the libraries that have versions of their own for it are imported."""
    import fcntl

    for name in LIBRARIES.split():
        importlib.import_module(name)

    def locking(fd: int, mode: int, size: int) -> None:
        """Lock bytes for an open file, not for the process: as Windows does, and Linux with F_OFD_SETLK."""
        place = os.lseek(fd, 0, os.SEEK_CUR)
        flock = b"".join((fcntl.F_WRLCK.to_bytes(2, "little"), bytes(6), place.to_bytes(8, "little")))
        try:
            fcntl.fcntl(fd, 37, flock + size.to_bytes(8, "little") + bytes(8))
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None

    console: Any = types.ModuleType("msvcrt")
    console.locking, console.LK_NBLCK, console.kbhit = locking, 2, lambda: False
    sys.modules["msvcrt"] = console

    def memory(status: Any) -> bool:
        status[1], status[2] = 8 << 30, 4 << 30
        return True

    ctypes.windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(GlobalMemoryStatusEx=memory))
    subprocess.Popen.kill = lambda self: self.send_signal(9)  # type: ignore[method-assign]
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES.split()]:
        del sys.modules[name]
    pair, family = socket.socketpair, socket.AF_UNIX
    socket.socketpair = lambda *_: pair(family)  # Windows has one of its own
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]
    for module, names in ((os, OS), (signal, SIGNALS), (socket, "AF_UNIX")):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    opened = io.open

    def without_proc(file: Any, *arguments: Any, **named: Any) -> Any:
        if str(file).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return opened(file, *arguments, **named)

    io.open = builtins.open = without_proc  # type: ignore[assignment]


def import_everything() -> int:
    """Import every module, and return how many there are; those may be missing that need Triton."""
    count = 0
    for top in ("models", "engine", "chatterm"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if name.endswith("__main__") or name.startswith("engine.kernels.triton"):
                continue
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name not in ("triton", "torch.distributed"):
                    raise
            count += 1
    return count


def lock(folder: Path) -> list[bool]:
    """Return what two processes get that lock a file, and a third one when they have ended."""
    from models.system import BINARY, try_lock

    got = []
    first, second = (os.open(folder / "locked", os.O_RDWR | os.O_CREAT | BINARY) for _ in range(2))
    got += [try_lock(first), try_lock(second)]
    os.close(first)
    got.append(try_lock(second))
    os.close(second)
    return got


def store(folder: Path) -> bool:
    """Write blocks with line ends in them, read them again, and make room by removing a file that is open."""
    from engine.store.folder import HEADER, Folder
    from engine.store.readers import Readers

    payload, readers = memoryview(b"\r\n\x1a\n" * 1024), Readers(1)
    digests = [bytes([number]) * 32 for number in range(3)]
    blocks = Folder(folder / "kv", "same", 2 * (HEADER + len(payload)))
    for owner, digest in zip(("one", "two", "three"), digests, strict=True):
        blocks.begin(owner)
        assert blocks.append(owner, digest, payload)
    assert [digest in blocks for digest in digests] == [False, True, True]
    blocks.close()
    again, into = Folder(folder / "kv", "same"), memoryview(bytearray(len(payload)))
    is_whole = again.read(digests[2], into, readers)()
    again.close()
    return is_whole and into == payload


def said(*words: str) -> tuple[int, str]:
    """Return the exit code of a command, and what it prints."""
    from chatterm.cli.main import call

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = call(list(words))
    return code, out.getvalue()


def serve(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, done while a server without models runs in another thread."""
    from chatterm.backends.backend import ChatOptions
    from chatterm.server.process import engine_process
    from chatterm.server.spawn import ProcessOptions

    is_ready = threading.Event()
    options = ProcessOptions(ChatOptions())
    running = threading.Thread(
        target=lambda: asyncio.run(engine_process.serve(options, ready=lambda _: is_ready.set()))
    )
    running.start()
    try:
        assert is_ready.wait(120)
        return work()
    finally:
        said("stop")
        running.join(120)
        assert not running.is_alive()


def main(model: str, folder: Path) -> dict[str, Any]:
    """Try everything; `model` is a folder with a tiny model."""
    for name in ("CACHE", "CONFIG", "DATA", "RUNTIME"):
        os.environ[f"CHATTERM_{name}"] = str(folder / name.lower())
    if sys.platform != "win32":
        take_away()
    found: dict[str, Any] = {"modules": import_everything(), "lock": lock(folder), "store": store(folder)}
    found["help"] = said("--help")
    found["doctor"] = said("doctor")
    found["run"] = said(
        "run", model, "-p", "Hi", "--save", "--max-tokens", "8", "--device", "cpu", "--no-server"
    )
    found["sessions"] = said("sessions")
    found["ps"] = serve(lambda: said("ps"))
    found["gone"] = said("ps")
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
