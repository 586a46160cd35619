"""What the HTTP API needs besides chatterm itself: optional packages and a key."""

import os
from importlib.util import find_spec
from pathlib import Path

from chatterm.server.logs import log
from engine.errors import EngineError

_PACKAGES = ("starlette", "uvicorn", "httptools")


def check_extra() -> None:
    """Raise EngineError if packages of the server are not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise EngineError(
            f"The server needs {', '.join(missing)}; install them with: pip install 'chatterm[server]'"
        )


def read_key(path: Path) -> str:
    """Read the API key, which is the only line of this file. Raises EngineError."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise EngineError(f"The API key cannot be read from {path}: {reason}.") from None
    if len(key) < 8 or not key.isprintable() or " " in key:
        raise EngineError(f"The key in {path} must be one line of at least 8 characters without spaces.")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        log.warning("Others can read the API key in %s; chmod 600 keeps it to you.", path)
    return key
