"""The options shared by the commands that use a model, and functions that read them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chatterm.cli.option_parsers import parse_device, parse_disk, parse_draft, parse_ranks, seconds_given
from chatterm.cli.shell_completion import model_names
from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError

if TYPE_CHECKING:
    from chatterm.backends.backend import Backend, ChatOptions
    from chatterm.backends.failover import FailoverBackend
    from chatterm.backends.remote.address import Remote
    from chatterm.settings.presets import SavedPreset
    from chatterm.settings.settings import Settings

MODEL = (
    "A catalogue name (smollm2, qwen3:0.6b, ...), a Hub id (owner/name, optional @revision), "
    "hf.co/owner/name/file.gguf, a folder, or a .gguf file."
)
ASKED = (
    f"{MODEL[:-1]}; or a model on a server: openai://HOST:PORT/MODEL, ollama://HOST:PORT/MODEL, "
    "or a remote from the settings (NAME or NAME/MODEL)."
)
_MODEL = typer.Argument(metavar="MODEL", help=MODEL, show_default=False, autocompletion=model_names)
ModelArgument = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
MOST_STREAMS = 64
"""The most answers for which the KV cache reserves whole contexts; shorter answers leave room for more."""
_SAMPLING = "Sampling (defaults: the model's, then chatterm's)"
_FORMAT = "Format of the answers"
_MACHINE = "Machine"
_THINKING = "Thinking"

Tools = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="With -p: let the model use these tools in this folder without asking: read, search, fetch; "
        "write, run and MCP servers only with --allow-changes.",
        show_default=False,
    ),
]
AllowChanges = Annotated[
    bool,
    typer.Option(
        "--allow-changes", help="Let tools named by --tools write files, run commands and ask MCP servers."
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Model, system prompt, tools and sampling of this preset (/preset lists them).",
        show_default=False,
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")]
Theme = Annotated[str | None, typer.Option(metavar="NAME", help="The colour theme.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 always picks the most likely token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample from the k most likely tokens; 0 means all.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the most likely tokens whose probabilities add up to p.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens less likely than this fraction of the top one.", rich_help_panel=_SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1 discourages repeating earlier tokens.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(help="Above 0 discourages tokens already in the answer.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 0 discourages tokens by how often they are in the answer.", rich_help_panel=_SAMPLING
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed, the same text for the same conversation.", rich_help_panel=_SAMPLING),
]
StopRepetition = Annotated[
    bool | None,
    typer.Option(
        help="Stop an answer that repeats itself endlessly; on by default for models on this machine.",
        rich_help_panel=_SAMPLING,
    ),
]
Speculation = Annotated[
    Literal["auto", "off", "suffix", "draft"] | None,
    typer.Option(
        help="Guess what comes next, and check several tokens at once: from what was said before (suffix), by the "
        "draft model, or by both (auto). The text stays the same.",
        rich_help_panel=_SAMPLING,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="The maximum length of an answer, in tokens.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Stop when this text is generated; repeatable.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Schema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Each answer is JSON that matches this JSON schema.", rich_help_panel=_FORMAT
    ),
]
JsonObject = Annotated[
    bool, typer.Option("--json-object", help="Each answer is a JSON object.", rich_help_panel=_FORMAT)
]
Regex = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Each answer matches this regular expression as a whole.",
        rich_help_panel=_FORMAT,
    ),
]
Think = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(help="Whether a reasoning model thinks before it answers.", rich_help_panel=_THINKING),
]
ThinkCache = Annotated[
    Literal["exact", "mask"],
    typer.Option(
        help="After thinking: recompute the answer without it (exact), or keep both cached and hide "
        "the thinking (mask).",
        rich_help_panel=_THINKING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda|cuda:N",
        help="Where the model runs; cuda:1 is the second GPU.",
        rich_help_panel=_MACHINE,
    ),
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32", "float16"],
    typer.Option(help="The number format used for computing.", rich_help_panel=_MACHINE),
]
Quantize = Annotated[
    Literal["auto", "none", "int8", "int4"],
    typer.Option(
        help="Weights: quantised as in the file (auto), expanded (none), or plain ones quantised to 8 or 4 bits.",
        rich_help_panel=_MACHINE,
    ),
]
KVDtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp8", "int8"],
    typer.Option(
        "--kv-dtype",
        help="The KV cache: as the model computes (auto), or 8 bits per number, which halves the memory "
        "that long contexts take and the data read for each token.",
        rich_help_panel=_MACHINE,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="The context size: maximum tokens in a conversation.", rich_help_panel=_MACHINE),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A small model of the same family that guesses what comes next; auto: the catalogue's, if it "
        "is on this machine; none: no such model. The text stays the same.",
        rich_help_panel=_MACHINE,
        show_default=False,
        autocompletion=model_names,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="CPU threads. Default: all physical cores except slow ones; of more than two, the screen gets one.",
        rich_help_panel=_MACHINE,
    ),
]
Attention = Annotated[
    Literal["auto", "flash", "triton", "sdpa"],
    typer.Option(
        help="The attention kernels; chatterm doctor lists those that work here.",
        rich_help_panel=_MACHINE,
    ),
]
NoGraph = Annotated[
    bool,
    typer.Option("--no-graph", help="Decode on a GPU without CUDA graphs.", rich_help_panel=_MACHINE),
]
NoTune = Annotated[
    bool,
    typer.Option(
        "--no-tune",
        help="On a GPU: neither measure how its kernels run fastest nor use earlier measurements.",
        rich_help_panel=_MACHINE,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="On a GPU: the same text for the same conversation and seed, whatever else runs at the same time. Slower.",
        rich_help_panel=_MACHINE,
    ),
]
TensorParallel = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="How many GPUs share the work of every layer; auto: the fewest that have room for the model.",
        rich_help_panel=_MACHINE,
    ),
]
DiskGb = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="GB",
        help="Disk space for the KV cache of saved conversations, so that they continue at once after a "
        "restart; 0: none.",
        rich_help_panel=_MACHINE,
        show_default=False,
    ),
]
NoServer = Annotated[
    bool,
    typer.Option(
        "--no-server",
        help="Load the model in this process, even if a chatterm server is running.",
        rich_help_panel=_MACHINE,
    ),
]
KeepAlive = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Keep the model loaded for the next chatterm run, until it has not been used for this long: "
        "30m, 2h, forever; 0: do not keep it. chatterm ps shows it, chatterm stop frees it.",
        rich_help_panel=_MACHINE,
        show_default=False,
    ),
]


def engine_options(invocation: typer.Context) -> "ChatOptions":
    """Return the options of a server's command line: how models are loaded and what is cached."""
    from chatterm.backends.backend import ChatOptions

    given = invocation.params
    same = [
        "think_cache",
        "dtype",
        "quantize",
        "kv_dtype",
        "context",
        "threads",
        "attention",
        "deterministic",
    ]
    return ChatOptions(
        **{name: given[name] for name in same},
        device=parse_device(given["device"]),
        graphs=not given["no_graph"],
        tune=not given["no_tune"],
        tensor_parallel=parse_ranks(given["tensor_parallel"]),
        disk_gb=parse_disk(given.get("disk_gb")),
        draft=parse_draft(given.get("draft")),
    )


def chat_options(invocation: typer.Context) -> "ChatOptions":
    """Return the options of a chat's command line, with defaults for those not given.

    Raises WrongUsage for a value out of range, and for text that is not UTF-8.
    """
    from chatterm.backends.backend import ChatOptions
    from chatterm.settings.settings import SamplingSettings

    given = invocation.params
    names = [part.name for part in fields(SamplingSettings)]
    sampling = {name: given[name] for name in names if given[name] not in (None, [], ())}
    if "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    for text in (given["system"] or "", *sampling.get("stop", ())):
        check_utf8(text)
    same = (
        "dtype",
        "quantize",
        "kv_dtype",
        "context",
        "threads",
        "attention",
        "deterministic",
        "system",
        "think",
        "think_cache",
    )
    return ChatOptions(
        **{name: given[name] for name in same if name in given},
        device=parse_device(given["device"]),
        graphs=not given["no_graph"],
        tune=not given["no_tune"],
        tensor_parallel=parse_ranks(given["tensor_parallel"]),
        disk_gb=parse_disk(given.get("disk_gb")),
        draft=parse_draft(given.get("draft")),
        sampling=checked_sampling(sampling),
    )


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
    """Return the fields of ChatOptions for which the command line overrides the settings."""
    names = {
        "device",
        "context",
        "threads",
        "disk_gb",
        "draft",
        "system",
        "tensor_parallel",
        "think",
        "think_cache",
    } & invocation.params.keys()
    found = {name for name in names if is_given(invocation, name)}
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
