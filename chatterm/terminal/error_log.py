"""The log of unexpected errors: a file that never grows large."""

import os
import traceback
from pathlib import Path
from time import strftime

from chatterm.terminal.sanitize import one_line, visible
from models.files import write_whole

_LARGEST = 200_000
"""The most bytes of the file; beyond that only its newer half is kept."""
_LONGEST = 20_000
"""The most characters of one traceback; only its end is kept."""


def log_path() -> Path:
    """Return the path of the log: beside the sessions if CHATTERM_DATA is set, else where the platform keeps logs."""
    if chosen := os.environ.get("CHATTERM_DATA"):
        return Path(chosen).expanduser() / "errors.log"
    from platformdirs import user_log_path

    return user_log_path("chatterm", appauthor=False) / "errors.log"


def write_down(error: BaseException) -> str:
    """Append the traceback, without variables: they may hold the user's texts. Return one line on where it is."""
    path = log_path()
    text = visible("".join(traceback.format_exception(error)))[-_LONGEST:]
    entry = f"--- {strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n".encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = path.read_bytes() if path.exists() else b""
        if len(before) + len(entry) > _LARGEST:
            before = before[-_LARGEST // 2 :]
            before = before[before.find(b"\n--- ") + 1 :]
        write_whole(path, (before + entry).decode("utf-8", "replace"), mode=0o600)
    except OSError as problem:
        return f"Details could not be written to {path}: {problem.strerror or problem}."
    return f"Details are in {path}."


def error_line(error: BaseException) -> str:
    """Describe an error in one line."""
    said = one_line(str(error), limit=160).rstrip(".")
    return f"An unexpected error: {type(error).__name__}{': ' if said else ''}{said}."
