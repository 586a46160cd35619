"""Completion of a command that is being typed: its name, its argument, or the file that it names."""

import re

from chatterm.commands.registry import Command, all_commands, find


def completions(text: str) -> list[tuple[str, Command]]:
    """Return completions of a name that is being typed, with their commands: names first, then aliases."""
    if not re.fullmatch(r"/([A-Za-z][\w-]*)?", text):
        return []
    typed, known = text[1:].lower(), all_commands()
    named = [(command.name, command) for command in known if command.name.startswith(typed)]
    aliases = [(alias, command) for command in known for alias in command.aliases if typed]
    return named + [(alias, command) for alias, command in aliases if alias.startswith(typed)]


def choice_completions(text: str) -> list[str]:
    """Return completions of the line `/name arg`, as whole lines; [] if the command has none to offer."""
    return [line for line in _offered(text) if line != text]


def is_whole(text: str) -> bool:
    """Return whether the argument of `/name arg` is valid as written, even if it could be completed further."""
    command, _, argument = _with_argument(text)
    if command is not None and command.accepts is not None:
        return command.accepts(argument)
    return text in _offered(text)


def _offered(text: str) -> list[str]:
    """Return completions of the line `/name arg`, including `text` itself if it is one."""
    command, name, argument = _with_argument(text)
    if command is None:
        return []
    if command.goes_on is not None:
        return [f"/{name} {more}" for more in command.goes_on(argument)]
    offered = command.suggest() if command.suggest is not None else command.choices
    more = {choice: choice[len(argument) :] for choice in offered if choice.startswith(argument)}
    return [f"/{name} {choice}" for choice, rest in more.items() if " " not in rest.rstrip()]


def _with_argument(text: str) -> tuple[Command | None, str, str]:
    """Return the command of `/name arg`, its name as written, and its argument; None, "" and "" for other text."""
    match = re.fullmatch(r"/([A-Za-z][\w-]*) (.*)", text)
    return (find(match[1].lower()), match[1], match[2]) if match is not None else (None, "", "")


def path_start(text: str) -> int | None:
    """Return where the file name in a command line starts; None if no file name belongs there."""
    match = re.fullmatch(r"/([A-Za-z][\w-]*)(\s+)(.*)", text)
    command = find(match[1].lower()) if match else None
    if match is None or command is None or not command.takes_path:
        return None
    first, gap, _ = match[3].partition(" ")
    if first in command.choices:
        return match.start(3) + len(first) + 1 if gap else None
    return match.start(3) if command.goes_on is None else None
