"""`chatterm serve`: the engine as a server that stays warm."""

import signal
import sys
import threading
from dataclasses import replace
from typing import Annotated, Any

import typer

from chatterm.cli import options
from chatterm.cli.durations import seconds_of
from chatterm.cli.shell_completion import model_names
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError

_STREAMS = 4
"""Conversations for which the KV cache has room, however long they are."""


def serve(
    invocation: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Load this model at once, as in chatterm run; others are loaded when they are asked for.",
            show_default=False,
            autocompletion=model_names,
        ),
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Unload a model that nobody has used for so long: 30m, 1h, 0, forever."
        ),
    ] = "30m",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = "auto",
    context: options.Context = None,
    threads: options.Threads = None,
    attention: options.Attention = "auto",
    no_graph: options.NoGraph = False,
    deterministic: options.Deterministic = False,
) -> None:
    """Keep models loaded for other programs and terminals, until Ctrl+C.

    chatterm run and chatterm batch use a server that runs here by themselves, and answer at once.
    """
    options.check_model(model)
    stays = seconds_of(keep_alive, "--keep-alive")
    from chatterm.settings.settings import with_settings

    chosen = with_settings(
        options.engine_options(invocation), options.preferences(), options.decided(invocation)
    )
    chosen = replace(chosen, streams=_STREAMS, system=None, sampling={})
    raise typer.Exit(_serve(model, chosen, stays))


def _serve(model: str | None, chosen: Any, stays: float | None) -> int:
    """Serve terminals until somebody ends it; the exit code."""
    from chatterm.server.engine_process import ProcessOptions
    from chatterm.server.supervisor import EngineChild

    child = EngineChild(ProcessOptions(chosen, stays))
    stopped = threading.Event()

    def stop(*_: Any) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if model is not None:
            load_first(model, stays)
        print("Ready for chatterm run and chatterm batch; Ctrl+C or chatterm stop ends it.", file=sys.stderr)
        while not stopped.wait(0.2):
            if (code := child.code) is not None:
                if code == 0:
                    return 0
                raise EngineError(
                    f"The engine process has ended unexpectedly (exit code {code}); start again."
                )
        print("Ending; running answers are told.", file=sys.stderr)
        return 0
    finally:
        child.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def load_first(model: str, stays: float | None) -> None:
    """Have the server load a model, and show how far it is. Raises ModelError and EngineError."""
    from pathlib import Path

    from chatterm.backends.attach import greeted
    from chatterm.backends.wire import Hold, Loading
    from chatterm.channel.messages import unpacked
    from chatterm.cli.progress import progress_on
    from models.progress import Progress

    found = greeted("command")
    if found is None:
        raise EngineError("The engine process does not answer.")
    link, _ = found
    try:
        with progress_on(sys.stderr) as on_progress:
            answers = link.call("hold", Hold(model, str(Path.cwd()), stays if stays is not None else -1.0))
            while (body := answers.next()) is not None:
                said = unpacked(body, Loading)
                on_progress(Progress(said.stage, said.what, said.done, said.total))  # type: ignore[arg-type]
    finally:
        link.close()
    print(f"{one_line(model)} is loaded.", file=sys.stderr)
