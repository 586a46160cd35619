"""Where this user's server is found: one socket, in a folder that other users cannot enter.

    FOLDER/engine.sock    a Unix socket
    FOLDER/engine.port    on Windows instead: a port of the loopback interface, and what each side has to say first
    FOLDER/engine.lock    locked by the running server

Everybody on the machine can connect to a port, or listen on it once the server is gone. So the client begins with one
secret of the file and the server replies with the other; whoever has them can read the folder, which is this user's.
"""

import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from engine.errors import EngineError
from models.files import write_whole
from models.system import BINARY, NOFOLLOW, try_lock

_LONGEST = 100
"""The longest path of a socket, in bytes; Linux allows 107, macOS 103."""
_SECRET = 32
"""The bytes of a secret."""


class ServerRunsError(EngineError):
    """A server is already running."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The listening socket, and the secrets where connecting alone does not show who connects; else empty."""

    socket: socket.socket
    asked: bytes = b""
    """The first bytes of every client."""
    reply: bytes = b""
    """The first bytes to a client that has sent `asked`."""


def has_unix_sockets() -> bool:
    """Return whether Python has Unix sockets here."""
    return hasattr(socket, "AF_UNIX") and sys.platform != "win32"


def folder() -> Path:
    """Return the runtime folder: CHATTERM_RUNTIME, or one for the user's session. It need not exist."""
    if given := os.environ.get("CHATTERM_RUNTIME"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "chatterm"
    return Path(tempfile.gettempdir()) / f"chatterm{_user()}"


def _user() -> str:
    """Return an ending for names in folders that users share; Windows has a folder for each."""
    return f"-{os.getuid()}" if hasattr(os, "getuid") else ""


def socket_path() -> Path:
    """Return the path of the server's socket. If the folder's path is too long, a short one in /tmp is used."""
    if not has_unix_sockets():
        return folder() / "engine.port"
    path = folder() / "engine.sock"
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    name = sha256(os.fsencode(path)).hexdigest()[:16]
    return Path("/tmp") / f"chatterm{_user()}-{name}" / "engine.sock"


def has_socket() -> bool:
    """Return whether a server may be running here. Checks one file."""
    return socket_path().exists()


def check_folder(path: Path) -> None:
    """Raise EngineError unless the folder at `path` is this user's own and closed to everybody else.

    On Windows, where files have no mode, only that it is a folder: those of a user's profile are closed to others.
    """
    try:
        state = path.lstat()
    except OSError as error:
        raise EngineError(f"The folder {path} cannot be used ({error.strerror}).") from error
    has_owner = hasattr(os, "getuid")
    if not stat.S_ISDIR(state.st_mode) or (has_owner and state.st_uid != os.getuid()):
        raise EngineError(f"{path} is not a folder of yours; remove it, or set CHATTERM_RUNTIME to another.")
    if has_owner and state.st_mode & 0o077:
        raise EngineError(f"Other users have access to the folder {path}; run: chmod 700 {path}")


@contextmanager
def listen() -> Iterator[Listener]:
    """Yield the listening socket of this user's only server. The socket of a killed server is removed.

    Raises ServerRunsError if a server is already running, EngineError if the folder cannot be used.
    """
    path = socket_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(f"The folder {path.parent} cannot be created ({error.strerror}).") from error
    check_folder(path.parent)
    lock = os.open(path.with_name("engine.lock"), os.O_RDWR | os.O_CREAT | BINARY | NOFOLLOW, 0o600)
    try:
        if not _is_first(lock, path.parent):
            raise ServerRunsError(
                "A chatterm server is already running; see chatterm ps, or end it with chatterm stop."
            )
        with suppress(FileNotFoundError):
            path.unlink()  # its server is gone, or it would hold the lock
        try:
            made = _bound(path) if has_unix_sockets() else _bound_to_port(path)
        except OSError as error:
            raise EngineError(f"The socket {path} cannot be created ({error.strerror}).") from error
        with made.socket:
            try:
                yield made
            finally:
                with suppress(OSError):
                    path.unlink()
    finally:
        os.close(lock)


def _is_first(lock: int, folder: Path) -> bool:
    try:
        return try_lock(lock)
    except OSError as error:
        raise EngineError(f"The folder {folder} cannot be used ({error.strerror}).") from error


def _bound(path: Path) -> Listener:
    made = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
        made.listen(64)
    except BaseException:
        made.close()
        raise
    finally:
        os.umask(before)
    return Listener(made)


def _bound_to_port(path: Path) -> Listener:
    made = socket.socket(socket.AF_INET)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        made.bind(("127.0.0.1", 0))
        made.listen(64)
        listener = Listener(made, secrets.token_bytes(_SECRET), secrets.token_bytes(_SECRET))
        said = f"{made.getsockname()[1]} {listener.asked.hex()} {listener.reply.hex()}\n"
        write_whole(path, said, mode=0o600)
    except BaseException:
        made.close()
        raise
    return listener


def connect(timeout: float = 2.0) -> socket.socket | None:
    """Return a connection to this user's server; None if there is none. `timeout` is in seconds."""
    path = socket_path()
    made = socket.socket(socket.AF_UNIX if has_unix_sockets() else socket.AF_INET)
    made.settimeout(timeout)
    try:
        check_folder(path.parent)
        if has_unix_sockets():
            made.connect(str(path))
            is_ours = is_own(made)
        else:
            is_ours = _greeted(made, path)
        if is_ours:
            made.settimeout(None)
            return made
    except (OSError, ValueError, OverflowError, EngineError):  # no server, or one that we do not trust
        pass
    made.close()
    return None


def _greeted(peer: socket.socket, path: Path) -> bool:
    """Connect to the port that the file `path` names, and return whether its server is there.

    Raises OSError, and ValueError or OverflowError for another content.
    """
    port, asked, reply = path.read_text(encoding="ascii").split()
    peer.connect(("127.0.0.1", int(port)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(bytes.fromhex(asked))
    came = b""
    while len(came) < _SECRET and (more := peer.recv(_SECRET - len(came))):
        came += more
    return secrets.compare_digest(came, bytes.fromhex(reply)) and len(came) == _SECRET


def is_own(peer: socket.socket) -> bool:
    """Return whether this user is at the other end of a Unix socket; True if the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED") or peer.family == socket.AF_INET:
        return True
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", found)[1] == os.getuid())
