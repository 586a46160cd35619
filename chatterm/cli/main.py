"""The command line. Heavy imports are inside the commands, so that `--help` answers at once."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from chatterm.cli import options, usage
from chatterm.cli.acp import acp
from chatterm.cli.batch import batch
from chatterm.cli.config import config_app
from chatterm.cli.library import library_app
from chatterm.cli.mcp import mcp_app
from chatterm.cli.option_parsers import parse_device
from chatterm.cli.run import run
from chatterm.cli.serve import serve
from chatterm.cli.sessions import sessions_app
from chatterm.cli.shell_completion import model_names
from chatterm.cli.usage import WrongUsage, check_trace
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError
from models.errors import ModelError

app = typer.Typer(
    help="Chat with a language model in the terminal. The model runs on this machine.",
    epilog="chatterm --install-completion sets up Tab completion of commands, options and models; "
    "man chatterm is the manual.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_app, name="config")
app.add_typer(sessions_app, name="sessions")
app.add_typer(library_app, name="library")
app.add_typer(mcp_app, name="mcp")

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells count it: 128 + SIGINT."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code: the entry point of the console script `chatterm`."""
    sys.exit(call(arguments))


def call(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C.

    Every error becomes one line on standard error; CHATTERM_DEBUG=1 adds its traceback.
    """
    usage.put_in_order()
    try:
        code = usage.command_line(app)(args=arguments, prog_name="chatterm", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (ModelError, EngineError) as error:
        return _failed(str(error))
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        if hasattr(error, "format_message"):  # what Typer raises for wrong usage
            message = error.format_message().replace(": Value error, ", ": ")  # the words of pydantic
            return _failed(message, code=getattr(error, "exit_code", 2))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _no_space()
        hint = "" if _debugging() else "; set CHATTERM_DEBUG=1 to see where"
        return _failed(f"Unexpected {type(error).__name__}: {error}{hint}")


def _failed(message: str, code: int = 1) -> int:
    if _debugging() and code == 1:
        import traceback

        traceback.print_exc()
    print(f"chatterm: {one_line(message)}", file=sys.stderr)
    return code


def _no_space() -> int:
    """Report a full disk. Buffered standard output is dropped, or Python would try to write it at exit."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _failed("The disk is full; make room, or write to another one.")


def _debugging() -> bool:
    return os.environ.get("CHATTERM_DEBUG", "") not in ("", "0")


@app.callback(invoke_without_command=True)
def chatterm(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            print(f"chatterm {installed('chatterm')}")
        except PackageNotFoundError:
            print("chatterm (not installed)")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit(context.command(["run"], prog_name="chatterm", standalone_mode=False))
    usage.check_surroundings()


app.command()(run)
app.command()(batch)
app.command()(serve)
app.command()(acp)


@app.command()
def ps(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show the running server: its models, their memory, who uses them."""
    from chatterm.cli.servers import show_server

    raise typer.Exit(show_server(as_json=as_json))


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print the figures of one second and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON a second.")] = False,
) -> None:
    """Watch the running server: requests, tokens/s, latency, KV cache; q or Ctrl+C ends it."""
    from chatterm.cli.top import watch

    if not (once or as_json or sys.stdout.isatty()):
        raise WrongUsage("The live view needs a terminal; add --once or --json.")
    raise typer.Exit(watch(once=once, as_json=as_json))


@app.command()
def stop() -> None:
    """End the running server; running answers end with a message."""
    from chatterm.cli.servers import stop_server

    raise typer.Exit(stop_server())


@app.command()
def pull(model: options.ModelArgument) -> None:
    """Download MODEL, or resume an interrupted download."""
    from chatterm.cli import models as model_commands

    model_commands.pull(model)


@app.command()
def doctor(
    invocation: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Measure now how the GPU's kernels run fastest for MODEL; the next start uses the result.",
            autocompletion=model_names,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Show in which GPU kernels a token of MODEL spends its time.",
            autocompletion=model_names,
        ),
    ] = None,
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="With --profile: where the trace for Perfetto goes.")
    ] = Path("chatterm-trace.json"),
    device: Annotated[str | None, typer.Option(metavar="cuda:N", help="Which of several GPUs.")] = None,
) -> None:
    """Report what this machine can do: GPU, kernels, memory, expected speed."""
    from chatterm.cli import doctor as doctor_command

    device = parse_device(device)
    if tune is not None and profile is not None:
        raise WrongUsage("--tune and --profile cannot be combined; use one of them.")
    if options.is_given(invocation, "trace"):
        check_trace(trace, profile)
    if tune is not None or profile is not None:
        if as_json:
            raise WrongUsage("--tune and --profile print no JSON; leave out --json.")
        options.check_model(tune or profile)
        if tune is not None:
            doctor_command.tune(tune, device)
        elif profile is not None:
            from chatterm.cli.profile import profile as show_profile

            show_profile(profile, trace, device)
        return
    doctor_command.examine(device, as_json=as_json)


@app.command("list")
def list_models() -> None:
    """List the models on this machine."""
    from chatterm.cli import models as model_commands

    model_commands.list_models()


@app.command()
def rm(
    model: options.ModelArgument,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete MODEL from this machine."""
    from chatterm.cli import models as model_commands

    if not yes:
        if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
            raise WrongUsage("There is no terminal to confirm on; add --yes to delete the model.")
        if not model_commands.confirm_removal(model):
            raise typer.Exit(1)
    model_commands.remove(model)


@app.command()
def quantize(
    model: options.ModelArgument,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="OUT.gguf for a GGUF file, a new folder for a folder.", show_default=False
        ),
    ],
) -> None:
    """Write MODEL in 4 bits to OUT, calibrated on a short text; the most sensitive weights stay in 8 bits."""
    from chatterm.cli.quantize import quantize as quantize_model

    quantize_model(model, out)


@app.command()
def verify(
    model: options.ModelArgument,
    online: Annotated[
        bool, typer.Option("--online", help="Ask the Hub for the hashes, not only the cache.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the files of MODEL against the Hub's hashes, or the manifest beside them; exit code 1 if one is damaged."""
    from chatterm.cli.verify import check

    raise typer.Exit(check(model, online=online, as_json=as_json))


@app.command()
def show(model: options.OptionalModel = None) -> None:
    """Show what MODEL is, and how it would run here (on the Hub only its description is fetched); without MODEL, list
    the architectures that can be run."""
    from chatterm.cli.show import show as show_model

    show_model(model, parse_device(None))
