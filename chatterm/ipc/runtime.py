"""Where this user's server is found: one socket, in a folder that other users cannot enter."""

import os
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from engine.errors import EngineError

_LONGEST = 100
"""The longest path of a socket, in bytes; Linux allows 107, macOS 103."""


class ServerRunsError(EngineError):
    """A server is already running."""


def is_supported() -> bool:
    """Return whether this system has what a server needs."""
    return hasattr(socket, "AF_UNIX") and sys.platform != "win32"


def folder() -> Path:
    """Return the runtime folder: CHATTERM_RUNTIME, or one for the user's session. It need not exist."""
    if given := os.environ.get("CHATTERM_RUNTIME"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "chatterm"
    return Path(tempfile.gettempdir()) / f"chatterm-{os.getuid()}"


def socket_path() -> Path:
    """Return the path of the server's socket. If the folder's path is too long, a short one in /tmp is used."""
    path = folder() / "engine.sock"
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    name = sha256(os.fsencode(path)).hexdigest()[:16]
    return Path("/tmp") / f"chatterm-{os.getuid()}-{name}" / "engine.sock"


def has_socket() -> bool:
    """Return whether a server may be running here. Checks one file."""
    return is_supported() and socket_path().exists()


def check_folder(path: Path) -> None:
    """Raise EngineError unless the folder at `path` is this user's own and closed to everybody else."""
    try:
        state = path.lstat()
    except OSError as error:
        raise EngineError(f"The folder {path} cannot be used ({error.strerror}).") from error
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise EngineError(f"{path} is not a folder of yours; remove it, or set CHATTERM_RUNTIME to another.")
    if state.st_mode & 0o077:
        raise EngineError(f"Other users have access to the folder {path}; run: chmod 700 {path}")


@contextmanager
def listen() -> Iterator[socket.socket]:
    """Yield the listening socket of this user's only server. The socket of a killed server is removed.

    Raises ServerRunsError if a server is already running, EngineError if the folder cannot be used.
    """
    import fcntl

    path = socket_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(f"The folder {path.parent} cannot be created ({error.strerror}).") from error
    check_folder(path.parent)
    lock = os.open(path.with_name("engine.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServerRunsError(
                "A chatterm server is already running; see chatterm ps, or end it with chatterm stop."
            ) from None
        with suppress(FileNotFoundError):
            path.unlink()  # its server is gone, or it would hold the lock
        with socket.socket(socket.AF_UNIX) as made:
            before = os.umask(0o177)
            try:
                made.bind(str(path))
            except OSError as error:
                raise EngineError(f"The socket {path} cannot be created ({error.strerror}).") from error
            finally:
                os.umask(before)
            made.listen(64)
            try:
                yield made
            finally:
                with suppress(OSError):
                    path.unlink()
    finally:
        os.close(lock)


def connect(timeout: float = 2.0) -> socket.socket | None:
    """Return a connection to this user's server; None if there is none. `timeout` is in seconds."""
    if not is_supported():
        return None
    path = socket_path()
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(timeout)
    try:
        made.connect(str(path))
        check_folder(path.parent)
        if is_own(made):
            made.settimeout(None)
            return made
    except (OSError, EngineError):  # no server, or one that we do not trust
        pass
    made.close()
    return None


def is_own(peer: socket.socket) -> bool:
    """Return whether this user is at the other end; True if the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", found)[1] == os.getuid())
