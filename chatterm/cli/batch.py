"""`chatterm batch`: answers to a file of requests, many at once, in the order of the file."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import typer

from chatterm.cli import options
from chatterm.cli.shell_completion import model_names
from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError


def batch(
    invocation: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As in chatterm run. It may be left out: FILE then comes first, and the default model answers.",
            show_default=False,
            autocompletion=model_names,
        ),
    ],
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The requests; - is standard input.", show_default=False),
    ] = None,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="FILE", help="Where the results go; - is standard output."),
    ] = "-",
    system: options.System = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    stop_repetition: options.StopRepetition = None,
    speculation: options.Speculation = None,
    think: options.Think = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = "auto",
    kv_dtype: options.KVDtype = "auto",
    context: options.Context = None,
    draft: options.Draft = None,
    threads: options.Threads = None,
    attention: options.Attention = "auto",
    no_graph: options.NoGraph = False,
    no_tune: options.NoTune = False,
    tensor_parallel: options.TensorParallel = "1",
    deterministic: options.Deterministic = False,
    no_server: options.NoServer = False,
) -> None:
    """Answer the requests in FILE, many at once; one result a line, in their order.

    A request is a JSON object on a line of its own, with "prompt": TEXT or
    "messages": [{"role": "user", "content": TEXT}, ...] (system, user, assistant).

    It may have an "id", and these, which take precedence over the options given here:
    temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
    frequency_penalty, seed, max_tokens, stop, stop_repetition, speculation, think and
    response_format.

    A "response_format" is {"type": "json_object"} or
    {"type": "json_schema", "json_schema": {"schema": SCHEMA}}: the answer is JSON that matches.

    A result has the number of its line, the id, and the answer ("text",
    "reasoning", "finish_reason", "stats") or an "error" of that line alone.

    If it is stopped, the same command continues where it left off.
    """
    name = model if file is None else file
    chosen_model = None if file is None else model
    options.check_model(chosen_model)
    chosen = options.chat_options(invocation)
    from chatterm.cli.batch_run import Batch
    from chatterm.cli.results import Results
    from chatterm.settings.settings import with_settings
    from models.hub.default import DEFAULT_MODEL

    preferences = options.preferences()
    chosen = replace(
        with_settings(chosen, preferences, options.decided(invocation)), streams=options.MOST_STREAMS
    )
    model = chosen_model or preferences.model.name or DEFAULT_MODEL
    settings = {
        "model": model,
        "system": chosen.system,
        "think": chosen.think,
        "sampling": dict(chosen.sampling),
    }
    with _source(name) as source:
        results = (
            Results("standard output", _standard_output(), source, resumes=False)
            if output == "-"
            else Results.open(output, source)
        )
        with options.answering(model, chosen, no_server, remotes=preferences.remotes) as backend:
            run = Batch(backend, source, results, json.dumps(settings, sort_keys=True).encode())
            try:
                run.answer()
            except BrokenPipeError:  # the reader of the results is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            finally:
                results.close()


@contextmanager
def _source(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        if sys.stdin is None:
            raise WrongUsage("There is no standard input; name a file of requests.")
        yield cast("BinaryIO", sys.stdin.buffer)
        return
    try:
        file = Path(name).open("rb")  # noqa: SIM115 - errors of the caller's block are not about opening it
    except IsADirectoryError:
        raise EngineError(f"{name} is a folder; name a file of requests.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EngineError(
            f"{one_line(name, 200)} cannot be read ({why}); name a file of requests."
        ) from error
    with file:
        yield file


def _standard_output() -> BinaryIO:
    return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
