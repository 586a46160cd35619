"""`chatterm acp`: an editor shows the conversation, chatterm answers."""

import os
import sys
from typing import Annotated, Any

import typer

from chatterm.cli import options
from chatterm.cli.usage import WrongUsage
from engine.errors import EngineError


@options.takes(options.THINKING, options.MACHINE, without=("disk_gb", "keep_alive"))
def acp(
    invocation: typer.Context,
    model: options.AskedModel = None,
    tools: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Tools that are on from the start: read, search, write, run, fetch, or all. The editor asks before "
            "each call, and switches tools on and off with its modes.",
            show_default=False,
        ),
    ] = "",
    preset: options.Preset = None,
    system: options.System = None,
    **shared: Any,
) -> None:
    """Answer an editor (Zed, Toad, ...) that speaks the Agent Client Protocol on standard input and output.

    The editor starts this command. Conversations are saved like any others: chatterm run --session continues them.
    """
    from importlib.util import find_spec

    if find_spec("acp") is None:
        raise EngineError(
            "Editors need the package agent-client-protocol; install it with: pip install 'chatterm[acp]'"
        )
    if sys.stdin is None or sys.stdin.isatty():
        raise WrongUsage(
            "chatterm acp is started by an editor; docs/editors.md says how to set up Zed and Toad."
        )
    options.check_model(model)
    chosen = options.chat_options(invocation)
    of_preset: set[str] = set()
    if preset is not None:
        chosen, stated, of_preset = options.with_preset(chosen, preset, invocation)
        model, tools = model or stated.model, tools or ",".join(stated.tools or ())
    _check_tools(tools)
    from chatterm.settings.settings import with_settings
    from models.hub.default import DEFAULT_MODEL

    preferences = options.preferences()
    sampling = dict(chosen.sampling)
    chosen = with_settings(chosen, preferences, options.decided(invocation) | of_preset)
    name = model or preferences.model.name or DEFAULT_MODEL
    from importlib.metadata import version

    from chatterm.acp.serve import serve
    from chatterm.sessions.store import SessionStore

    with options.answering(name, chosen, shared["no_server"], remotes=preferences.remotes) as backend:
        store = SessionStore.open() if preferences.sessions.save else None
        is_saved = serve(
            backend,
            store,
            sampling=sampling,
            settings=preferences.sampling.given(),
            tools=tools,
            version=version("chatterm"),
        )
        if store is not None and not is_saved:
            print(f"chatterm: {store.farewell}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0 if is_saved else 1)  # loading a model cannot be interrupted


def _check_tools(names: str) -> None:
    """Raise WrongUsage for an unknown tool."""
    from pathlib import Path

    from chatterm.tools.box import ToolRegistry
    from chatterm.tools.builtin.all import built_in

    box = ToolRegistry(built_in(Path.cwd()))
    for word in filter(None, (name.strip() for name in names.split(","))):
        try:
            box.found(word)
        except EngineError as error:
            raise WrongUsage(f"--tools: {error}") from None
