"""What every command raises for a command line that makes no sense, and what several of them check."""

import sys
from pathlib import Path

import typer

from engine.errors import EngineError


class WrongUsage(typer.BadParameter):
    """A command line that makes no sense; exit code 2."""

    def format_message(self) -> str:
        return self.message


def check_alone(answers: int, **flags: bool) -> None:
    """Raises WrongUsage for an option that is about one conversation."""
    for name, is_given in flags.items():
        if is_given:
            many = "-n" if answers > 1 else "--parallel"
            raise WrongUsage(f"{name} is for one conversation; leave out {name} or {many}.")


def check_folder() -> None:
    """Raises WrongUsage where the working folder was deleted: torch would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise WrongUsage(
            "The current folder no longer exists; cd to one that does, and start again."
        ) from None


def check_theme(theme: str | None) -> None:
    """Raises WrongUsage for a theme that does not exist, whatever else the command line asks for."""
    if theme is None:
        return
    from chatterm.settings.themes import load_theme

    try:
        load_theme(theme)
    except EngineError as error:
        raise WrongUsage(str(error)) from error


def check_trace(trace: Path, profile: str | None) -> None:
    """Raises WrongUsage before any work for a trace that nothing writes, or that has no place."""
    if profile is None:
        raise WrongUsage("--trace goes with --profile; add --profile MODEL, or leave it out.")
    if trace.is_dir():
        raise WrongUsage(f"{trace} is a folder; name a file with --trace.")
    if not trace.parent.is_dir():
        raise WrongUsage(f"There is no folder {trace.parent}; create it, or name another file with --trace.")


def check_output() -> None:
    """Raises WrongUsage where there is no standard output: the answer would be lost."""
    if sys.stdout is None:
        raise WrongUsage("Standard output is closed; start again without >&-, or with > FILE.")
