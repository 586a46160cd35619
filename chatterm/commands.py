"""The slash commands. This one list feeds the parser, the completion, /help and the command palette."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from chatterm.backend import EngineError


class Actions(Protocol):
    """What a command may do; the chat screen does it."""

    def show_help(self) -> None: ...
    def show_stats(self) -> None: ...
    def reset(self) -> None: ...
    def retry(self) -> None: ...
    def undo(self) -> None: ...
    def think(self, mode: str) -> None: ...
    def system(self, text: str) -> None: ...
    def model(self, name: str) -> None: ...
    def theme(self, name: str) -> None: ...
    def quit(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `run` gets what stands behind its name, without the space around it."""

    name: str
    arguments: str
    """How the arguments are written: "[NAME]"; "" for none."""
    help: str
    run: Callable[[Actions, str], None]
    aliases: tuple[str, ...] = ()
    """Names from other programs that mean the same."""
    choices: tuple[str, ...] = ()
    """The only arguments there are; () for free text."""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".strip()


COMMANDS: tuple[Command, ...] = (
    Command("help", "", "Show commands and keys", lambda a, _: a.show_help(), ("?",)),
    Command("stats", "", "Figures of this turn and of the session", lambda a, _: a.show_stats()),
    Command("reset", "", "Forget the conversation and begin anew", lambda a, _: a.reset(), ("clear", "new")),
    Command("retry", "", "Answer the last message once more", lambda a, _: a.retry()),
    Command("undo", "", "Take back the last message", lambda a, _: a.undo()),
    Command(
        "think",
        "[on|off|auto|show|hide]",
        "Thinking: do it, show it",
        lambda a, text: a.think(text),
        choices=("on", "off", "auto", "show", "hide"),
    ),
    Command("system", "[TEXT|none]", "Show or set the system prompt", lambda a, text: a.system(text)),
    Command("model", "[NAME]", "Show the models, or take another", lambda a, text: a.model(text)),
    Command("theme", "[NAME]", "Show or change the colours", lambda a, text: a.theme(text)),
    Command("quit", "", "Leave", lambda a, _: a.quit(), ("exit", "bye")),
)

_COMMAND_LINE = re.compile(r"/([A-Za-z?][\w-]*|\?)?(?:\s+(.*))?\Z", re.DOTALL)


def is_command(text: str) -> bool:
    """Whether `text` is meant as a command. A path ("/usr/bin") or a text after a space is a message."""
    return _COMMAND_LINE.match(text) is not None


def parse(text: str) -> tuple[Command, str]:
    """The command and its argument. Raises EngineError (one line) for what is no command."""
    match = _COMMAND_LINE.match(text)
    name = (match[1] or "").lower() if match else ""
    command = next((c for c in COMMANDS if name in (c.name, *c.aliases)), None)
    if command is None:
        raise EngineError(
            f"There is no command /{name}; /help shows all. To send it as text put a space before."
        )
    argument = ((match[2] if match else "") or "").strip()
    if argument and not command.arguments:
        raise EngineError(f"/{name} takes nothing behind it.")
    if argument and command.choices and argument not in command.choices:
        raise EngineError(f"/{name} takes one of {', '.join(command.choices)}; not {argument!r}.")
    return command, argument


def completions(text: str) -> list[Command]:
    """Commands that what has been typed so far may become: while the name itself is being typed."""
    if not re.fullmatch(r"/[A-Za-z]*", text):
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:].lower())]


def choice_completions(text: str) -> list[str]:
    """Whole lines that `/name arg` may become, where the command has a fixed set of arguments."""
    match = re.fullmatch(r"/([A-Za-z]+) (\S*)", text)
    command = next((c for c in COMMANDS if match and c.name == match[1].lower()), None)
    if match is None or command is None:
        return []
    return [f"/{command.name} {choice}" for choice in command.choices if choice.startswith(match[2])]
