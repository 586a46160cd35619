"""The base of the commands of the chat screen."""

from collections.abc import Callable, Iterable
from typing import Any

from chatterm.backends.backend import Backend, Exchange
from chatterm.conversation.compaction import nth
from chatterm.conversation.entries import AnswerEntry
from chatterm.markdown.lines import Line
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.drafts import Writing
from chatterm.screens.chat.finding import Finding
from chatterm.screens.chat.parts import ScreenPart
from chatterm.screens.report import ReportScreen

LOADING = "The model is still loading."


class CommandPart(ScreenPart):
    """Some commands of the chat screen."""

    def __init__(
        self, screen: ChatBase, writing: Writing, finding: Finding, run: Callable[[str, str], None]
    ) -> None:
        """Create the part; `run` runs a command by name and argument."""
        super().__init__(screen)
        self.writing = writing
        self.finding = finding
        self._run = run

    def report(self, name: str, title: str, builder: Callable[[int], Iterable[Line]]) -> None:
        """Show the report of the command `name` over the conversation; `builder` returns its lines for a width."""

        def closed(other: str | None) -> None:
            if other is not None:
                self._run(other, "")

        self.screen.app.push_screen(ReportScreen(name, title, builder), closed)

    def use_sampling(self, chosen: dict[str, Any]) -> None:
        """Use these sampling settings for the conversation from the next answer on."""
        self.conversation.sampling = dict(chosen)
        sampling = {**self.screen.settings.sampling.given(), **chosen}
        self.screen.submit(Backend.configure, {"sampling": sampling})

    def chosen_exchange(self) -> Exchange | None:
        """Return the exchange of the selected message, else the last one; None if there is none."""
        path = self.conversation.path
        found = self.conversation.exchange_of(self.selected) if self.selected is not None else None
        return found or (path[-1] if path else None)

    def nth_exchange(self, number: str) -> Exchange:
        """Return the n-th exchange of the current branch, from 1, or from the end if negative."""
        return nth(self.conversation.path, number)

    def answer_of(self, exchange: Exchange) -> AnswerEntry:
        return self.conversation.entries_of(exchange)[1]
