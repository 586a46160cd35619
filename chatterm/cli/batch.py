"""`chatterm batch`: answers to a file of requests, many at once, in the order of the file."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import RawIOBase
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import typer

from chatterm.cli import options
from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError


@options.takes(
    options.SAMPLING, options.THINKING, options.MACHINE, without=("think_cache", "disk_gb", "keep_alive")
)
def batch(
    invocation: typer.Context,
    model: Annotated[
        str,
        options.model_argument(
            "As in chatterm run. It may be left out: FILE then comes first, and the default model answers."
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
    **shared: Any,
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
        with options.answering(model, chosen, shared["no_server"], remotes=preferences.remotes) as backend:
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


def _standard_output() -> RawIOBase:
    return os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
