"""What every command raises for a command line that makes no sense."""

import typer


class WrongUsage(typer.BadParameter):
    """A command line that makes no sense; exit code 2."""

    def format_message(self) -> str:
        return self.message
