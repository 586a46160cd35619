"""The command line. Heavy imports stand inside the commands, so that `--help` answers at once."""

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, BinaryIO, Literal, NoReturn, cast

import typer
from typer.main import get_command

from chatterm.backends.backend import ChatOptions, EngineError, ModelError
from chatterm.cli.config import config_app
from chatterm.cli.sessions import sessions_app
from chatterm.cli.shell_completion import model_names
from chatterm.terminal.sanitize import one_line

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

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells count it: 128 + SIGINT."""

_MODEL = (
    "A catalogue name (smollm2, qwen3:0.6b, ...), a Hub id (owner/name, optional @revision), "
    "hf.co/owner/name/file.gguf, a folder, or a .gguf file."
)
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False, autocompletion=model_names)
]
_SAMPLING = "Sampling (defaults: the model's, then chatterm's)"
_MACHINE = "Machine"
_THINKING = "Thinking"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script `chatterm`."""
    sys.exit(call(arguments))


def call(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C.

    Every error becomes one line on standard error; CHATTERM_DEBUG=1 adds its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the locale lacks must not end the answer
            stream.reconfigure(errors="replace")
    try:
        code = get_command(app)(args=arguments, prog_name="chatterm", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (ModelError, EngineError) as error:
        return _failed(str(error))
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        if hasattr(error, "format_message"):  # what Typer raises for wrong usage
            return _failed(error.format_message(), code=getattr(error, "exit_code", 2))
        hint = "" if _debugging() else "; set CHATTERM_DEBUG=1 to see where"
        return _failed(f"Unexpected {type(error).__name__}: {error}{hint}")


def _failed(message: str, code: int = 1) -> int:
    if _debugging() and code == 1:
        import traceback

        traceback.print_exc()
    print(f"chatterm: {one_line(message)}", file=sys.stderr)
    return code


def _debugging() -> bool:
    return os.environ.get("CHATTERM_DEBUG", "") not in ("", "0")


class WrongUsage(typer.BadParameter):
    """A command line that makes no sense; exit code 2."""

    def format_message(self) -> str:
        return self.message


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
        print(context.get_help())


@app.command()
def run(
    invocation: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{_MODEL} Default: smollm2.",
            show_default=False,
            autocompletion=model_names,
        ),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Answer this prompt and exit, as with -p.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            help="Answer this prompt and exit; repeat for more turns.",
            show_default=False,
        ),
    ] = None,
    continue_last: Annotated[
        bool, typer.Option("-c", "--continue", help="Continue the latest session.")
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Continue this session, given by id, title or part of the title."),
    ] = None,
    save: Annotated[
        bool,
        typer.Option("--save", help="Save a -p conversation as a session to continue later."),
    ] = False,
    inline: Annotated[
        bool,
        typer.Option("--inline", help="Chat in plain text, line by line, for pipes and screen readers."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON object per turn: text, reasoning, finish_reason, stats."),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print statistics of each turn on standard error.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    theme: Annotated[str | None, typer.Option(metavar="NAME", help="The colour theme.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always picks the most likely token.", rich_help_panel=_SAMPLING)
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Sample from the k most likely tokens; 0 means all.", rich_help_panel=_SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens whose probabilities add up to p.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens less likely than this fraction of the top one.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1 discourages repeating earlier tokens.", rich_help_panel=_SAMPLING),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(help="Above 0 discourages tokens already in the answer.", rich_help_panel=_SAMPLING),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same text for the same conversation.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="The maximum length of an answer, in tokens.", rich_help_panel=_SAMPLING),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Stop when this text is generated; repeatable.",
            rich_help_panel=_SAMPLING,
            show_default=False,
        ),
    ] = None,
    think: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Whether a reasoning model thinks before it answers.", rich_help_panel=_THINKING),
    ] = "auto",
    think_cache: Annotated[
        Literal["exact", "mask"],
        typer.Option(
            help="After thinking: recompute the answer without it (exact), or keep both cached and hide "
            "the thinking (mask).",
            rich_help_panel=_THINKING,
        ),
    ] = "exact",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.", rich_help_panel=_MACHINE)
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        typer.Option(help="The number format used for computing.", rich_help_panel=_MACHINE),
    ] = "auto",
    quantize: Annotated[
        Literal["auto", "none", "int8", "int4"],
        typer.Option(
            help="CPU weights: as in the GGUF file (auto), expanded (none), or quantised to 8 or 4 bits.",
            rich_help_panel=_MACHINE,
        ),
    ] = "auto",
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="The context size: maximum tokens in a conversation.", rich_help_panel=_MACHINE
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads. Default: all physical cores, minus one for the screen if there are more than two.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    attention: Annotated[
        Literal["auto", "flash", "triton", "sdpa"],
        typer.Option(
            help="The attention kernels; chatterm doctor lists those that work here.",
            rich_help_panel=_MACHINE,
        ),
    ] = "auto",
    no_graph: Annotated[
        bool,
        typer.Option("--no-graph", help="Decode on a GPU without CUDA graphs.", rich_help_panel=_MACHINE),
    ] = False,
) -> None:
    """Chat with MODEL; with TEXT, -p or text on standard input, answer and exit.

    Piped text goes before the first -p, separated by a blank line; with --inline, each line of it is a message.

    The answer goes to standard output, everything else to standard error.
    """
    settings = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop": tuple(stop) if stop else None,
    }
    options = ChatOptions(
        device=device,
        dtype=dtype,
        quantize=quantize,
        context=context,
        threads=threads,
        attention=attention,
        graphs=not no_graph,
        system=system,
        think=think,
        think_cache=think_cache,
        sampling=checked_sampling({name: value for name, value in settings.items() if value is not None}),
    )
    _check_theme(theme)
    _check_model(model)
    if question:
        prompt = [" ".join(question), *(prompt or [])]
    if inline and as_json:
        raise WrongUsage("--inline writes plain text; leave out --json.")
    prompts = checked_texts(prompt or []) if inline else checked_prompts(prompt or [])
    for text in (system or "", *(stop or ())):
        _check_utf8(text)
    if not prompts and not inline:
        if as_json or stats:
            raise WrongUsage("--json and --stats need a prompt; add -p TEXT, or pipe text in.")
        if not sys.stdout.isatty():
            raise WrongUsage(
                "The chat screen needs a terminal; add -p TEXT or pipe text in to get an answer here."
            )
    resume: dict[str, Any] = {}
    if continue_last and session is not None:
        raise WrongUsage("--continue and --session cannot be combined; use one of them.")
    if continue_last or session is not None:
        from chatterm.sessions.resume import find_session, resumed

        chosen = find_session(session)
        given = {name: _is_given(invocation, name) for name in ("think", "think_cache")}
        options = resumed(options, chosen, **given)
        model = model or chosen.model or None
        resume["session"] = chosen.id
    from chatterm.settings.paths import config_path
    from chatterm.settings.settings import SessionSettings, Settings, with_settings

    preferences = Settings.load(config_path())
    decided = {
        name
        for name in ("device", "context", "threads", "system", "think", "think_cache")
        if _is_given(invocation, name)
    }
    decided |= {"system", "think", "think_cache"} if resume else set()
    chosen_sampling = dict(options.sampling)
    options = with_settings(options, preferences, decided)
    model = model or preferences.model.name
    if model is None and not prompts and not resume and _is_terminal():
        from chatterm.cli.first_run import first_model

        model = first_model(options.device, options.dtype)
    from chatterm.backends.local import LocalBackend
    from models.hub.catalogue import DEFAULT_MODEL

    backend = LocalBackend(DEFAULT_MODEL if model is None else model, options)
    if inline:
        from chatterm.cli.inline import run_inline

        code = run_inline(
            backend, first=prompts, stats=stats, sampling=chosen_sampling, settings=preferences, **resume
        )
        raise typer.Exit(code)
    if not prompts:
        gc.disable()  # the first frame stands sooner; run_app turns it on again then
        from chatterm.app import run_app

        _check_theme(preferences.screen.theme)
        if save:
            preferences = replace(preferences, sessions=SessionSettings(save=True))
        raise typer.Exit(
            run_app(backend, theme=theme, settings=preferences, sampling=chosen_sampling, **resume)
        )
    from chatterm.cli.oneshot import answer

    chosen_sampling = dict(options.sampling)
    answer(backend, prompts, as_json=as_json, stats=stats, save=save, sampling=chosen_sampling, **resume)


def _check_theme(theme: str | None) -> None:
    """Raises WrongUsage for a theme that does not exist, whatever else the command line asks for."""
    if theme is None:
        return
    from chatterm.settings.themes import load_theme

    try:
        load_theme(theme)
    except EngineError as error:
        raise WrongUsage(str(error)) from error


def _check_model(model: str | None) -> None:
    """Raises WrongUsage where MODEL is a question: no model's name holds several words."""
    if model is None or len(model.split()) < 2:
        return
    from models.hub.sources import parse

    try:
        parse(model)
    except ModelError:
        shown = one_line(model, 60)
        raise WrongUsage(
            f"Unknown model {shown!r}; to ask the default model a question, use: chatterm run -p TEXT"
        ) from None


def _is_terminal() -> bool:
    """Whether a person can be asked something."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def _is_given(invocation: typer.Context, name: str) -> bool:
    source = invocation.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def checked_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, each known to be in its range. Raises WrongUsage before any model is loaded."""
    from engine.params import SamplingParams

    try:
        SamplingParams(**settings)
    except EngineError as error:
        raise WrongUsage(str(error)) from error
    return settings


def checked_texts(prompts: Sequence[str]) -> list[str]:
    """What was given with -p. Raises WrongUsage."""
    for text in prompts:
        if not text.strip():
            raise WrongUsage("The prompt is empty; add some text.")
        _check_utf8(text)
    return list(prompts)


def checked_prompts(prompts: Sequence[str], stdin: BinaryIO | None = None) -> list[str]:
    """The turns to send, from -p and from standard input; [] asks for the screen. Raises WrongUsage."""
    from chatterm.cli.oneshot import InputError, join_prompts, read_input

    checked_texts(prompts)
    if stdin is None:
        # None where there is no standard input at all, as under some schedulers.
        if sys.stdin is None or sys.stdin.isatty():
            return list(prompts)
        stdin = cast("BinaryIO", sys.stdin.buffer)
    try:
        turns = join_prompts(read_input(stdin), prompts)
    except InputError as error:
        raise WrongUsage(str(error)) from error
    if not turns:
        raise WrongUsage("The prompt is empty: standard input had no text; add -p TEXT.")
    return turns


def _check_utf8(text: str) -> None:
    # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongUsage(
            "The command line is not UTF-8 text; convert it first, or use a UTF-8 terminal."
        ) from error


@app.command()
def pull(model: ModelArgument) -> None:
    """Download MODEL, or resume an interrupted download."""
    from chatterm.cli import models as model_commands

    model_commands.pull(model)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report what this machine can do: GPU, kernels, memory, expected speed."""
    from chatterm.cli.doctor import examine

    examine(as_json=as_json)


@app.command("list")
def list_models() -> None:
    """List the models on this machine."""
    from chatterm.cli import models as model_commands

    model_commands.list_models()


@app.command()
def rm(
    model: ModelArgument,
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
def show(model: ModelArgument) -> None:
    """Show details of MODEL: architecture, parameters, context, files."""
    from chatterm.cli import models as model_commands

    model_commands.show(model)
