"""The API keys: who may call, by name."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from chatterm.server.logs import log
from engine.errors import EngineError
from models.units import counted

_SHORTEST = 8
_LEAST = counted(_SHORTEST, "character")


class ApiKeys:
    """The keys that a server accepts, which may change while it runs."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: the name of each key."""
        self.replace(names)

    def replace(self, names: Mapping[str, str]) -> None:
        """Accept these keys, and no others."""
        # Digests are looked up, so the duration of a search reveals nothing about a key.
        self._names = {_digest(key.encode()): name for key, name in names.items()}

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, which may be empty; None for one that is not accepted."""
        return self._names.get(_digest(key))


def read_keys(path: Path) -> dict[str, str]:
    """Read the name of each key from a file that has a key in each line, maybe behind a name. Raises EngineError."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise EngineError(f"The API keys cannot be read from {path}: {reason}.") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        *name, key = line.split()
        if len(name) > 1 or len(key) < _SHORTEST or not line.isprintable():
            raise EngineError(
                f"Line {number} of {path} must be a key of at least {_LEAST}, or a name and a key."
            )
        if key in found:
            raise EngineError(f"Line {number} of {path} repeats a key; each name needs its own.")
        found[key] = "".join(name)
    if not found:
        raise EngineError(f"There is no key in {path}; write one of at least {_LEAST} into it.")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        log.warning("Others can read the API keys in %s; chmod 600 keeps them to you.", path)
    return found


def read_on_hangup(path: Path, keys: ApiKeys) -> None:
    """Have the running event loop read the keys again on SIGHUP; end if it means that the terminal was closed."""
    if not hasattr(signal, "SIGHUP") or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    had_terminal = sys.stderr.isatty()

    def read() -> None:
        if had_terminal and not os.isatty(2):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        try:
            found = read_keys(path)
        except (EngineError, OSError) as error:
            log.warning("%s The keys from before stay in use.", error)
            return
        keys.replace(found)
        log.info("Read %d API keys from %s.", len(found), path)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read)


def _digest(text: bytes) -> bytes:
    return sha256(text).digest()
