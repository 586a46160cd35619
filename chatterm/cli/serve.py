"""`chatterm serve`: the engine as a server that stays warm."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chatterm.cli import options
from chatterm.cli.option_parsers import seconds_given
from engine.errors import EngineError

if TYPE_CHECKING:
    from chatterm.server.service import Service
    from chatterm.server.supervisor import Web

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_FEWEST, _SHORT = 4, 16
"""The KV cache has room for `_FEWEST` whole contexts at least; of running answers, one in `_SHORT` is taken as long."""


def long_ones(running: int) -> int:
    """Return how many conversations get a whole context in the KV cache if `running` are answered at the same time."""
    return max(_FEWEST, running // _SHORT)


@options.takes(options.THINKING, options.MACHINE, without=("no_server", "keep_alive"))
def serve(
    invocation: typer.Context,
    model: Annotated[
        str | None,
        options.model_argument(
            "Load this model at once, as in chatterm run; others are loaded when they are asked for."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="The address that the HTTP API listens on; one that others can reach needs a key."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port of the HTTP API; 0 takes a free one.")
    ] = 8642,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests need a key of this file; SIGHUP reads it again.",
            show_default=False,
        ),
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Unload a model that has not been used for this long: 30m, 1h, 0, forever."
        ),
    ] = "30m",
    max_running: Annotated[
        int,
        typer.Option(min=1, max=1024, help="The most answers computed at the same time; further ones wait."),
    ] = 64,
    max_context_per_request: Annotated[
        int | None,
        typer.Option(
            min=1, help="The most tokens a request may have, prompt and answer together.", show_default=False
        ),
    ] = None,
    strict_fields: Annotated[
        bool, typer.Option("--strict-fields", help="Refuse fields of requests that have no effect here.")
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="Log this and what is worse, on standard error.")
    ] = "info",
    log_format: Annotated[
        LogFormat, typer.Option(help="Log in text, or in one JSON object a line.")
    ] = "text",
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Log the texts of prompts, too; without this they never are."),
    ] = False,
    **_: Any,
) -> None:
    """Keep models loaded for other programs and terminals, until Ctrl+C.

    Programs use the HTTP API, in the formats of OpenAI's and Ollama's clients.
    chatterm run and chatterm batch find the server by themselves.
    """
    options.check_model(model)
    stays = seconds_given(keep_alive, "--keep-alive")
    import asyncio

    from chatterm.server.gc_tuning import leave_out
    from chatterm.server.logs import set_up
    from chatterm.server.spawn import ProcessOptions
    from chatterm.server.supervisor import Supervisor
    from chatterm.settings.settings import with_settings

    chosen = with_settings(
        options.chat_options(invocation), options.preferences(), options.decided(invocation)
    )
    chosen = replace(chosen, streams=long_ones(max_running), system=None, sampling={})
    set_up(log_level, log_format)
    make_web = _web(
        host, port, api_key_file, max_running, max_context_per_request, strict_fields, log_prompts
    )

    def load() -> None:
        if model is not None:
            load_first(model)
        leave_out()

    def ready(address: str) -> None:
        if address:
            _tell(f"The HTTP API is at {address}/v1")
        where = " and programs" if address else ""
        _tell(f"Ready for terminals{where}; Ctrl+C or chatterm stop ends it.")

    async def run() -> None:
        await Supervisor(ProcessOptions(chosen, stays), make_web, load, ready, _tell).run()

    asyncio.run(run())


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _web(
    host: str,
    port: int,
    key_file: Path | None,
    running: int,
    context: int | None,
    is_strict: bool,
    logs_prompts: bool,
) -> "Callable[[Service], Web] | None":
    """Return a function that makes the HTTP API; None if it is not installed. Raises EngineError."""
    from importlib import import_module

    try:
        extra = import_module("chatterm.server.http.dependencies")
        extra.check_extra()
        app, web, limits, request_log, api_keys = (
            import_module(f"chatterm.server.http.{name}")
            for name in ("app", "web", "limits", "request_log", "keys")
        )
    except (ImportError, EngineError) as error:
        why = str(error) if isinstance(error, EngineError) else "The HTTP API is not installed here."
        _tell(f"{why} Until then the server is for terminals only.")
        return None
    keys = api_keys.ApiKeys(api_keys.read_keys(key_file)) if key_file is not None else None

    def make(service: "Service") -> "Web":
        from chatterm.server.supervisor import Web

        bounds = limits.Limits(running=running, context=context)
        made = app.make_app(service, bounds, keys, is_strict, request_log.RequestLog(logs_prompts))
        socket = web.listen(made, host, port)
        if keys is not None:
            api_keys.read_on_hangup(key_file, keys)
        name = f"[{host}]" if ":" in host else host
        return Web(f"http://{name}:{socket.getsockname()[1]}", web.make_server(made), socket)

    return make


def load_first(model: str) -> None:
    """Make the server load a model, and show the progress. Raises ModelError and EngineError."""
    from chatterm.backends.failover import connect_to_server
    from chatterm.backends.protocol import Hold, Loading
    from chatterm.cli.progress import progress_on
    from chatterm.ipc.messages import unpack
    from chatterm.terminal.sanitize import one_line

    found = connect_to_server("command")
    if found is None:
        raise EngineError("The engine process does not answer.")
    link, _ = found
    try:
        with progress_on(sys.stderr) as on_progress:
            answers = link.call("hold", Hold(model, str(Path.cwd()), None))
            while (body := answers.next()) is not None:
                on_progress(unpack(body, Loading).progress)
    finally:
        link.close()
    _tell(f"{one_line(model)} is loaded.")
