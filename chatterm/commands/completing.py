"""What a command that is being typed may become: its name, its argument, or the file that it names."""

import re

from chatterm.commands.registry import Command, all_commands, find


def completions(text: str) -> list[tuple[str, Command]]:
    """Names that what has been typed so far may become, while the name itself is being typed: first those of
    commands, then those by which other programs call the same."""
    if not re.fullmatch(r"/([A-Za-z][\w-]*)?", text):
        return []
    typed, known = text[1:].lower(), all_commands()
    named = [(command.name, command) for command in known if command.name.startswith(typed)]
    aliases = [(alias, command) for command in known for alias in command.aliases if typed]
    return named + [(alias, command) for alias, command in aliases if alias.startswith(typed)]


def choice_completions(text: str) -> list[str]:
    """Whole lines that `/name arg` may become, where there are arguments to offer."""
    return [line for line in _offered(text) if line != text]


def is_whole(text: str) -> bool:
    """Whether the argument of `/name arg` is one as it is written, although it may become another."""
    command, _, argument = _with_argument(text)
    if command is not None and command.accepts is not None:
        return command.accepts(argument)
    return text in _offered(text)


def _offered(text: str) -> list[str]:
    """What `choice_completions` returns, with `text` itself where it is among that."""
    command, name, argument = _with_argument(text)
    if command is None:
        return []
    if command.goes_on is not None:
        return [f"/{name} {more}" for more in command.goes_on(argument)]
    offered = command.suggest() if command.suggest is not None else command.choices
    more = {choice: choice[len(argument) :] for choice in offered if choice.startswith(argument)}
    return [f"/{name} {choice}" for choice, rest in more.items() if " " not in rest.rstrip()]


def _with_argument(text: str) -> tuple[Command | None, str, str]:
    """The command of `/name arg`, its name as it is written, and its argument; None for anything else."""
    match = re.fullmatch(r"/([A-Za-z][\w-]*) (.*)", text)
    return (find(match[1].lower()), match[1], match[2]) if match is not None else (None, "", "")


def path_start(text: str) -> int | None:
    """Where in a command line the name of the file that is being written starts; None where no file belongs."""
    match = re.fullmatch(r"/([A-Za-z][\w-]*)(\s+)(.*)", text)
    command = find(match[1].lower()) if match else None
    if match is None or command is None or not command.takes_path:
        return None
    first, gap, _ = match[3].partition(" ")
    if first in command.choices:
        return match.start(3) + len(first) + 1 if gap else None
    return match.start(3) if command.goes_on is None else None
