"""What was sent before, for Up and Down."""

from collections.abc import Iterable


class PromptHistory:
    """Goes back and forth; the draft that was being written waits behind the newest entry."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: list[str] = []
        self._place = 0
        """Index of what is shown; the number of entries: the draft."""
        self._draft = ""

    def load(self, entries: Iterable[str]) -> None:
        """Entries of earlier sessions, newest last. They come before what was added since the start."""
        self._entries = [*entries, *self._entries]
        self._tidy()

    def add(self, text: str) -> None:
        """`text` was sent. The same text twice in a row is kept once."""
        if text.strip() and self._entries[-1:] != [text]:
            self._entries.append(text)
        self._tidy()

    def _tidy(self) -> None:
        del self._entries[: max(len(self._entries) - self._limit, 0)]
        self._place, self._draft = len(self._entries), ""

    def shows(self, text: str) -> bool:
        """Whether `text` is the entry that was called up, unchanged."""
        return self._place < len(self._entries) and self._entries[self._place] == text

    def step(self, step: int, text: str) -> str | None:
        """What to show one step back (-1) or forth (1) from `text`; None where there is nothing."""
        place = self._place + step
        if not 0 <= place <= len(self._entries):
            return None
        if self._place == len(self._entries):
            self._draft = text
        self._place = place
        return self._draft if place == len(self._entries) else self._entries[place]

    def leave(self) -> None:
        """The text was changed: it is a draft of its own now."""
        self._place = len(self._entries)
