"""What a command works with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Unpack

from chatterm.backends.backend import Backend, ConversationSettings, Exchange, ModelInfo
from chatterm.markdown.lines import Line
from chatterm.settings.settings import Settings


class ChatContext(Protocol):
    """A chat: the chat screen, or `--inline`. No call blocks the screen; each raises EngineError (one line)."""

    backend: Backend
    settings: Settings
    is_loading: bool

    @property
    def info(self) -> ModelInfo | None:
        """The model that is loaded; None if there is none yet."""

    @property
    def path(self) -> Sequence[Exchange]:
        """The exchanges of the branch."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings chosen for this conversation."""

    def say(self, text: str) -> None:
        """Tell the person something in a line or a few."""

    def report(
        self, name: str, title: str, lines: Callable[[int], Iterable[Line]], plain: Sequence[str] = ()
    ) -> None:
        """Show the report of the command `name`: its `lines` for a width in cells, or `plain` without a screen."""

    def show_thinking(self, opened: bool) -> None:
        """Show or hide the thinking of every answer."""

    def configure(self, **chosen: Unpack[ConversationSettings]) -> None:
        """Change `system`, `think` or `sampling` of this conversation from the next message on."""

    def rename(self, title: str) -> None:
        """Name the conversation `title`, even before its first message."""

    def switch_model(self, name: str) -> None:
        """Switch to this model; the history is kept."""

    def use_tools(self, words: str) -> None:
        """Do what `/tools` does with these words, once a model is loaded."""

    def use_prompt(self, name: str, argument: str, server: str = "") -> None:
        """Send the prompt whose command has this name, a person's own or that of an MCP server, with the argument."""

    def quit(self) -> None:
        """End the program; everything stays saved."""
