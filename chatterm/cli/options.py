"""The options shared by the commands that use a model, and functions that read them."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from chatterm.cli.option_parsers import parse_device, parse_disk, parse_draft, parse_ranks, seconds_given
from chatterm.cli.shell_completion import model_names
from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError
from engine.params import LoadOptions

if TYPE_CHECKING:
    from chatterm.backends.backend import Backend, ChatOptions
    from chatterm.backends.failover import FailoverBackend
    from chatterm.backends.remote.address import Remote
    from chatterm.settings.presets import SavedPreset
    from chatterm.settings.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])
Options = Mapping[str, Parameter]

MODEL = (
    "A catalogue name (smollm2, qwen3:0.6b, ...), a Hub id (owner/name, optional @revision), "
    "hf.co/owner/name/file.gguf, a folder, or a .gguf file."
)
ASKED = (
    f"{MODEL[:-1]}; or a model on a server: openai://HOST:PORT/MODEL, ollama://HOST:PORT/MODEL, "
    "or a remote from the settings (NAME or NAME/MODEL)."
)


def model_argument(help: str, **more: Any) -> Any:
    """Return the argument MODEL, whose names Tab completes."""
    return typer.Argument(metavar="MODEL", help=help, show_default=False, autocompletion=model_names, **more)


ModelArgument = Annotated[str, model_argument(MODEL)]
OptionalModel = Annotated[str | None, model_argument(MODEL)]
AskedModel = Annotated[str | None, model_argument(f"{ASKED} Default: smollm2.")]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Model, system prompt, tools and sampling of this preset (/preset lists them).",
        show_default=False,
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")]
MOST_STREAMS = 64
"""The most answers for which the KV cache reserves whole contexts; shorter answers leave room for more."""


def _option(
    help: str, *flags: str, kind: Any = Parameter.empty, default: Any = None, **more: Any
) -> Parameter:
    """Return an option; without `kind`, its type and default are those of the field of LoadOptions."""
    info = typer.Option(default, *flags, help=help, **more)
    return Parameter("option", Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def _panel(title: str, **options: Parameter) -> Options:
    """Return these options of a panel of the help, by name."""
    kinds, usual = get_type_hints(LoadOptions), LoadOptions()
    for name, option in options.items():
        option.default.rich_help_panel = title
        if option.annotation is Parameter.empty:
            option.default.default = getattr(usual, name)
            options[name] = option.replace(annotation=kinds[name])
    return {name: option.replace(name=name) for name, option in options.items()}


SAMPLING = _panel(
    "Sampling (defaults: the model's, then chatterm's)",
    temperature=_option("0 always picks the most likely token.", kind=float | None),
    top_k=_option("Sample from the k most likely tokens; 0 means all.", kind=int | None),
    top_p=_option("Sample from the most likely tokens whose probabilities add up to p.", kind=float | None),
    min_p=_option("Drop tokens less likely than this fraction of the top one.", kind=float | None),
    repetition_penalty=_option("Above 1 discourages repeating earlier tokens.", kind=float | None),
    presence_penalty=_option("Above 0 discourages tokens already in the answer.", kind=float | None),
    frequency_penalty=_option(
        "Above 0 discourages tokens by how often they are in the answer.", kind=float | None
    ),
    seed=_option("The same seed, the same text for the same conversation.", kind=int | None),
    max_tokens=_option("The maximum length of an answer, in tokens.", kind=int | None),
    stop=_option(
        "Stop when this text is generated; repeatable.",
        kind=list[str] | None,
        metavar="TEXT",
        show_default=False,
    ),
    stop_repetition=_option(
        "Stop an answer that repeats itself endlessly; on by default for models on this machine.",
        kind=bool | None,
    ),
    speculation=_option(
        "Guess what comes next, and check several tokens at once: from what was said before (suffix), by the "
        "draft model, or by both (auto). The text stays the same.",
        kind=Literal["auto", "off", "suffix", "draft"] | None,
    ),
)
FORMAT = _panel(
    "Format of the answers",
    schema=_option("Each answer is JSON that matches this JSON schema.", kind=str | None, metavar="FILE"),
    json_object=_option("Each answer is a JSON object.", "--json-object", kind=bool, default=False),
    regex=_option(
        "Each answer matches this regular expression as a whole.", kind=str | None, metavar="REGEX"
    ),
)
THINKING = _panel(
    "Thinking",
    think=_option(
        "Whether a reasoning model thinks before it answers.",
        kind=Literal["auto", "on", "off"],
        default="auto",
    ),
    think_cache=_option(
        "After thinking: recompute the answer without it (exact), or keep both cached and hide the thinking (mask).",
        kind=Literal["exact", "mask"],
        default="exact",
    ),
)
MACHINE = _panel(
    "Machine",
    device=_option("Where the model runs; cuda:1 is the second GPU.", metavar="auto|cpu|cuda|cuda:N"),
    dtype=_option(
        "The number format used for computing.",
        kind=Literal["auto", "bfloat16", "float32", "float16"],
        default="auto",
    ),
    quantize=_option(
        "Weights: quantised as in the file (auto), expanded (none), or plain ones quantised to 8 or 4 bits."
    ),
    kv_dtype=_option(
        "The KV cache: as the model computes (auto), or 8 bits per number, which halves the memory "
        "that long contexts take and the data read for each token."
    ),
    context=_option("The context size: maximum tokens in a conversation.", min=1),
    draft=_option(
        "A small model of the same family that guesses what comes next; auto: the catalogue's, if it "
        "is on this machine; none: no such model. The text stays the same.",
        metavar="MODEL",
        show_default=False,
        autocompletion=model_names,
    ),
    threads=_option(
        "CPU threads. Default: all physical cores except slow ones; of more than two, the screen gets one.",
        min=1,
    ),
    attention=_option(
        "The attention kernels; chatterm doctor lists those that work here.",
        kind=Literal["auto", "flash", "triton", "sdpa"],
        default="auto",
    ),
    no_graph=_option("Decode on a GPU without CUDA graphs.", "--no-graph", kind=bool, default=False),
    no_tune=_option(
        "On a GPU: neither measure how its kernels run fastest nor use earlier measurements.",
        "--no-tune",
        kind=bool,
        default=False,
    ),
    tensor_parallel=_option(
        "How many GPUs share the work of every layer; auto: the fewest that have room for the model.",
        kind=str,
        default="1",
        metavar="N|auto",
    ),
    deterministic=_option(
        "On a GPU: the same text for the same conversation and seed, whatever else runs at the same time. Slower.",
        "--deterministic",
    ),
    disk_gb=_option(
        "Disk space for the KV cache of saved conversations, so that they continue at once after a "
        "restart; 0: none.",
        min=0,
        metavar="GB",
        show_default=False,
    ),
    no_server=_option(
        "Load the model in this process, even if a chatterm server is running.",
        "--no-server",
        kind=bool,
        default=False,
    ),
    keep_alive=_option(
        "Keep the model loaded for the next chatterm run, until it has not been used for this long: "
        "30m, 2h, forever; 0: do not keep it. chatterm ps shows it, chatterm stop frees it.",
        kind=str | None,
        metavar="TIME",
        show_default=False,
    ),
)


def of_fields(kind: type) -> Options:
    """Return the options that the fields of a dataclass are, each annotated with what Typer shows of it."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        part.name: Parameter(
            part.name, Parameter.KEYWORD_ONLY, default=part.default, annotation=hints[part.name]
        )
        for part in fields(kind)
    }


def takes(*groups: Options, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command these options behind its own; it gets their values as keywords."""
    shared = [option for group in groups for name, option in group.items() if name not in without]

    def give(command: Command) -> Command:
        own = [p for p in signature(command).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        command.__signature__ = Signature([*own, *shared])  # type: ignore[attr-defined]
        return command

    return give


def chat_options(invocation: typer.Context) -> "ChatOptions":
    """Return the options of a command line, with defaults for those that it does not have.

    Raises WrongUsage for a value out of range, and for text that is not UTF-8.
    """
    from chatterm.backends.backend import ChatOptions

    given = invocation.params
    names = {*(part.name for part in fields(LoadOptions)), "system", "think", "think_cache"}
    sampling = {name: given[name] for name in SAMPLING if given.get(name) not in (None, [], ())}
    if "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    for text in (given.get("system") or "", *sampling.get("stop", ())):
        check_utf8(text)
    chosen: dict[str, Any] = {name: given[name] for name in names & given.keys()} | {
        "device": parse_device(given["device"]),
        "graphs": not given["no_graph"],
        "tune": not given["no_tune"],
        "tensor_parallel": parse_ranks(given["tensor_parallel"]),
        "disk_gb": parse_disk(given.get("disk_gb")),
        "draft": parse_draft(given["draft"]),
    }
    return ChatOptions(**chosen, sampling=checked_sampling(sampling) if sampling else {})


def with_preset(
    chosen: "ChatOptions", name: str, invocation: typer.Context
) -> "tuple[ChatOptions, SavedPreset, set[str]]":
    """Return `chosen` with what the preset states and the command line does not; the preset; and the fields it decides.

    Raises SettingsError.
    """
    from chatterm.settings.presets import load_preset

    preset = load_preset(name)
    stated = {"system": preset.system, "think": preset.think}
    fields: dict[str, Any] = {
        k: v for k, v in stated.items() if v is not None and not is_given(invocation, k)
    }
    sampling = {**preset.sampling, **chosen.sampling}
    return replace(chosen, **fields, sampling=sampling), preset, set(fields)


@contextmanager
def answering(
    model: str,
    options: "ChatOptions",
    no_server: bool,
    keep_alive_s: float | None = 0.0,
    remotes: "Mapping[str, Remote] | None" = None,
) -> "Iterator[Backend]":
    """Yield the backend: a server that `model` names; else this machine's server, if one runs that matches `options`;
    else an engine in this process.

    With `keep_alive_s` (None: for ever) a server that stays is started if none runs. At the end, tells what stays
    loaded. Raises EngineError for an invalid address.
    """
    from chatterm.backends.router import BackendRouter

    starts = keep_alive_s != 0 and not no_server
    left: list[FailoverBackend] = []
    is_talking = False

    def here(model: str, options: "ChatOptions") -> "Backend":
        from chatterm.ipc.runtime import has_socket

        if no_server or not (starts or has_socket()):
            return _local(model, options)
        from chatterm.backends.failover import attach

        def start() -> Callable[[], None]:
            from chatterm.server.spawn import left_behind

            return left_behind(options, keep_alive_s)

        if starts:
            found, why = attach(model, options, start, -1.0 if keep_alive_s is None else keep_alive_s)
        else:
            found, why = attach(model, options)
        if why and not is_talking:  # later there may be a screen
            print(f"chatterm: {one_line(why, 400)}", file=sys.stderr)
        if found is None:
            return _local(model, options)
        left.append(found)
        return found

    try:
        backend = BackendRouter(model, options, remotes or {}, here)
        is_talking = True
        yield backend
    finally:
        for stays in [found.stays for found in left if found.stays is not None]:
            if starts or sys.stderr.isatty():
                from chatterm.cli.servers import stays_text

                print(f"chatterm: {stays_text(stays)}", file=sys.stderr)


def _local(model: str, options: "ChatOptions") -> "Backend":
    from chatterm.backends.local import LocalBackend

    return LocalBackend(model, options)


def parse_keep_alive(given: str | None, settings: "Settings", no_server: bool) -> float | None:
    """Return the seconds that a model stays for the next command; 0: it does not, None: for ever. Raises WrongUsage."""
    if given is None:
        return seconds_given(settings.model.keep_alive or "0", "keep_alive")
    seconds = seconds_given(given, "--keep-alive")
    if no_server and seconds != 0:
        raise WrongUsage(
            "--no-server keeps the model in this process; leave out --no-server or --keep-alive."
        )
    return seconds


def decided(invocation: typer.Context) -> set[str]:
    """Return the names of what the command line decides, which the settings then do not."""
    found = {name for name in invocation.params if is_given(invocation, name)}
    return found | {"tune"} if invocation.params.get("no_tune") else found


def preferences() -> "Settings":
    """Load the person's settings."""
    from chatterm.settings.paths import config_path
    from chatterm.settings.reading import load_settings

    return load_settings(config_path())


def is_given(invocation: typer.Context, name: str) -> bool:
    source = invocation.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def checked_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` if all are in range; raise WrongUsage otherwise, before any model is loaded."""
    from engine.params import SamplingParams

    try:
        SamplingParams(**settings)
    except EngineError as error:
        raise WrongUsage(str(error)) from error
    return settings


def check_model(model: str | None) -> None:
    """Raise WrongUsage if MODEL looks like a question: no model's name has several words."""
    if model is None or len(model.split()) < 2:
        return
    from models.errors import ModelError
    from models.hub.sources import parse

    try:
        parse(model)
    except ModelError:
        shown = one_line(model, 60)
        raise WrongUsage(
            f"Unknown model {shown!r}; to ask the default model a question, use: chatterm run -p TEXT"
        ) from None


def check_utf8(text: str) -> None:
    """Raise WrongUsage unless `text` was UTF-8: other bytes of the command line arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongUsage(
            "The command line is not UTF-8 text; convert it first, or use a UTF-8 terminal."
        ) from error
