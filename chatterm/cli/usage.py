"""What every command raises for a command line that makes no sense, and what several of them check."""

from pathlib import Path

import typer


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
