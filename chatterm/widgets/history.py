"""Earlier prompts, for Up and Down."""

from collections.abc import Iterable


class PromptHistory:
    """Steps back and forth through the prompts; the unsent draft comes after the newest one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: list[str] = []
        self._place = 0
        """Index of the entry shown; the number of entries stands for the draft."""
        self._draft = ""

    def load(self, entries: Iterable[str]) -> None:
        """Load the prompts of earlier sessions, newest last, before those added since the start."""
        self._entries = [*entries, *self._entries]
        self._tidy()

    def add(self, text: str) -> None:
        """Add a prompt that was sent; skip a repetition of the last one."""
        if text.strip() and self._entries[-1:] != [text]:
            self._entries.append(text)
        self._tidy()

    def _tidy(self) -> None:
        del self._entries[: max(len(self._entries) - self._limit, 0)]
        self._place, self._draft = len(self._entries), ""

    def shows(self, text: str) -> bool:
        """Return whether `text` is the recalled entry, unchanged."""
        return self._place < len(self._entries) and self._entries[self._place] == text

    def step(self, step: int, text: str) -> str | None:
        """Move one step back (-1) or forward (1) from `text`. Return the text to show; None at either end."""
        place = self._place + step
        if not 0 <= place <= len(self._entries):
            return None
        if self._place == len(self._entries):
            self._draft = text
        self._place = place
        return self._draft if place == len(self._entries) else self._entries[place]

    def leave(self) -> None:
        """Return to the draft: the recalled text was edited."""
        self._place = len(self._entries)
