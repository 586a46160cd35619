"""Tool output, bounded and without control sequences for the terminal."""

import re

from chatterm.terminal.sanitize import cleaned

_HIDDEN = re.compile("[\U000e0000-\U000e007f]")
"""Tag characters, which models read but screens do not show: they could smuggle text past a person."""
MOST_CHARACTERS = 24_000
"""Characters of one result: about 6,000 tokens."""
_HELD = 4 * MOST_CHARACTERS
"""Characters of streamed output that are kept at each end before cleaning."""


def unhidden(text: str) -> str:
    """Return `text` without characters that only a model would read."""
    return _HIDDEN.sub("", text)


def bounded(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text` for a model and a screen: cleaned, and with its middle left out if it is too long."""
    text = unhidden(cleaned(text))
    if len(text) <= most:
        return text
    half = most // 2
    left = len(text) - 2 * half
    return f"{text[:half]}\n[... {left:,} characters left out ...]\n{text[-half:]}"


class Tail:
    """Streamed output of any length, of which the beginning and the end are kept."""

    def __init__(self) -> None:
        self._head = ""
        self._tail = ""
        self._lost = 0

    def add(self, text: str) -> None:
        room = _HELD - len(self._head)
        self._head += text[:room]
        self._tail += text[max(room, 0) :]
        if len(self._tail) > 2 * _HELD:  # not at every line
            self._trim()

    def _trim(self) -> None:
        if (over := len(self._tail) - _HELD) > 0:
            self._lost += over
            self._tail = self._tail[over:]

    @property
    def text(self) -> str:
        """The kept output, for `bounded`."""
        self._trim()
        gap = f"\n[... {self._lost:,} characters left out ...]\n" if self._lost else ""
        return f"{self._head}{gap}{self._tail}"
