"""Wrong usage: the error that commands raise, the checks they share, and repairs of the process's environment."""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError

_PLACES = ("CHATTERM_CACHE", "CHATTERM_CONFIG", "CHATTERM_DATA", "CHATTERM_RUNTIME")


class WrongUsage(typer.BadParameter):
    """An invalid command line; exit code 2."""

    def format_message(self) -> str:
        return self.message


def check_alone(answers: int, **flags: bool) -> None:
    """Raise WrongUsage if one of `flags` is set: they apply to a single conversation."""
    for name, is_given in flags.items():
        if is_given:
            many = "-n" if answers > 1 else "--parallel"
            raise WrongUsage(f"{name} is for one conversation; leave out {name} or {many}.")


def command_line(app: typer.Typer) -> Any:
    """Return all commands of `app` as Click commands, without the `<bool>` that Typer prints behind flags in the help.

    With it, a flag looks as if it took a value.
    """
    root = get_command(app)
    commands: list[tuple[Any, typer.Context | None]] = [(root, None)]
    for command, parent in commands:
        context = typer.Context(command, parent=parent, **command.context_settings)
        for param in command.get_params(context):
            if getattr(param, "is_flag", False):
                param.metavar = ""
        commands += [(below, context) for below in getattr(command, "commands", {}).values()]
    return root


def put_in_order() -> None:
    """Repair the environment: closed standard streams, and impossible terminal sizes and completion indices."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a database opened under this number would be overwritten by prints
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - as long as the process
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):  # with a huge width, libraries would fill the memory
        if not re.fullmatch(r"[1-9][0-9]{0,3}", os.environ.get(name, "80")):
            del os.environ[name]
    if not re.fullmatch(r"[0-9]{1,6}", os.environ.get("COMP_CWORD", "0")):
        os.environ["COMP_CWORD"] = "0"  # Typer's completion takes it for a number
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the locale lacks must not end the answer
            stream.reconfigure(errors="replace")


def check_surroundings() -> None:
    """Raise WrongUsage if the working folder is gone, or an environment variable names an impossible path."""
    try:
        Path.cwd()
    except FileNotFoundError:  # torch would end the process
        raise WrongUsage(
            "The current folder no longer exists; cd to one that does, and start again."
        ) from None
    for name in _PLACES:
        given = os.environ.get(name, "")
        try:
            Path(given).expanduser().exists()
        except RuntimeError:
            user = one_line(given.partition("/")[0], 80)
            raise WrongUsage(f"{name} begins with {user}, and there is no such user; write it out.") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise WrongUsage(
                    f"{name} has a name of too many characters for a path; choose a shorter one."
                ) from None


def check_theme(theme: str | None) -> None:
    """Raise WrongUsage for a theme that does not exist, whatever else the command line asks for."""
    if theme is None:
        return
    from chatterm.settings.themes import load_theme

    try:
        load_theme(theme)
    except EngineError as error:
        raise WrongUsage(str(error)) from error


def check_trace(trace: Path, profile: str | None) -> None:
    """Raise WrongUsage, before any work, for a trace without --profile, or that cannot be written."""
    if profile is None:
        raise WrongUsage("--trace goes with --profile; add --profile MODEL, or leave it out.")
    if trace.is_dir():
        raise WrongUsage(f"{trace} is a folder; name a file with --trace.")
    if not trace.parent.is_dir():
        raise WrongUsage(f"There is no folder {trace.parent}; create it, or name another file with --trace.")


def check_output() -> None:
    """Raise WrongUsage if there is no standard output: the answer would be lost."""
    if sys.stdout is None:
        raise WrongUsage("Standard output is closed; start again without >&-, or with > FILE.")
