"""What a conversation needs of the screen that shows it."""

from collections.abc import Sequence
from typing import Protocol

from chatterm.conversation.entries import Entry


class View(Protocol):
    """A screen."""

    def show_path(self, entries: Sequence[Entry], above: Entry | None = None) -> None:
        """Show these messages, in this order, below `above`, which stays with all that is above it."""

    def add(self, entry: Entry) -> None:
        """One more message, at the end."""

    def give_back(self, text: str) -> None:
        """Text that was not sent belongs into the composer again."""
