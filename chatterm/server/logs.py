"""The server's log: lines of text or JSON on standard error, in the form that systemd's journal reads where it does."""

import logging
import os
import sys
import time
from typing import Any

import msgspec

from chatterm.terminal.sanitize import visible

log = logging.getLogger("chatterm.server")

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""How systemd names the levels, as sd-daemon(3) describes."""


def set_up(level: str, format: str) -> None:
    """Write what is logged at `level` and above to standard error. `format`: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(format, _is_journal()))
    for name in ("chatterm", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def write(level: int, event: str, **fields: Any) -> None:
    """Log what happened and its fields; those that are None are left out."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": {k: v for k, v in fields.items() if v is not None}})


class _Lines(logging.Formatter):
    """Writes a record as one line, and a traceback after it in text."""

    def __init__(self, format: str, is_journal: bool) -> None:
        super().__init__()
        self._format = format
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level, said = record.levelname.lower(), record.getMessage()
        fields: dict[str, Any] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._format == "json":
            made = {
                "time": at,
                "level": level,
                "event": said,
                **fields,
                **({"trace": trace} if trace else {}),
            }
            line = msgspec.json.encode(made).decode()
        else:
            shown = " ".join([said, *(f"{name}={_shown(value)}" for name, value in fields.items())])
            line = visible(shown) if self._is_journal else f"{at} {level.upper()} {visible(shown)}"
            line += f"\n{trace}" if trace else ""
        return f"<{_PRIORITIES[level]}>{line}" if self._is_journal else line


def _shown(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = ",".join(value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if text and not any(char in ' "=' for char in text) else msgspec.json.encode(text).decode()


def _is_journal() -> bool:
    """Return whether the journal reads standard error."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))
