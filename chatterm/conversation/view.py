"""The interface of the screen that shows a conversation."""

from collections.abc import Generator, Sequence
from typing import Protocol

from chatterm.conversation.entries import Entry


class View(Protocol):
    """A screen."""

    def show_path(self, entries: Sequence[Entry], above: Entry | None = None) -> None:
        """Show these messages, in this order, below `above`, which stays with all that is above it."""

    def add(self, entry: Entry) -> None:
        """Append an entry at the end."""

    def change(self, work: Generator[None, None, None]) -> None:
        """Do `work`, which changes messages and yields after each piece, without holding up anything; then show it."""

    def give_back(self, text: str) -> None:
        """Put text that was not sent back into the composer."""
