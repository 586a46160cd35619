"""What a tool gives back: bounded, and without anything that a terminal would obey."""

import re

from chatterm.terminal.sanitize import cleaned

_HIDDEN = re.compile("[\U000e0000-\U000e007f]")
"""Letters that no screen shows and every model reads: nothing that a person was not told goes to it by them."""
MOST_CHARACTERS = 24_000
"""Of one result: about 6,000 tokens."""
_HELD = 4 * MOST_CHARACTERS
"""Characters of running output that are kept at each end before they are cleaned."""


def unhidden(text: str) -> str:
    """`text` without letters that only a model would read."""
    return _HIDDEN.sub("", text)


def bounded(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` for a model and for a screen: cleaned, and with its middle left out where it is too long."""
    text = unhidden(cleaned(text))
    if len(text) <= most:
        return text
    half = most // 2
    left = len(text) - 2 * half
    return f"{text[:half]}\n[... {left:,} characters left out ...]\n{text[-half:]}"


class Tail:
    """Output as it comes, of which beginning and end are kept, however much there is."""

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
        """What there is, for `bounded`."""
        self._trim()
        gap = f"\n[... {self._lost:,} characters left out ...]\n" if self._lost else ""
        return f"{self._head}{gap}{self._tail}"
