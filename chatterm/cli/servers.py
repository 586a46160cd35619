"""`chatterm ps` and `chatterm stop`: the server running on this machine."""

import json
import sys
import time
from contextlib import suppress

from chatterm.backends.backend import EngineError
from chatterm.backends.failover import Stays, connect_to_server
from chatterm.backends.protocol import LoadedModel, ServerStatus
from chatterm.ipc.link import Link, ServerGoneError
from chatterm.settings.durations import duration_text
from chatterm.terminal.sanitize import one_line
from models.units import bytes_text, counted

NONE = "No chatterm server is running; start one with chatterm serve."
NO_MODEL = "No model is loaded; each is loaded when it is first asked for."
_LEAVE = 20.0
"""Seconds to wait for a server to exit."""


def show_server(*, as_json: bool) -> int:
    """Print the server's status; return the exit code."""
    link = command_link()
    if link is None:
        print(json.dumps(None) if as_json else NONE, file=sys.stdout if as_json else sys.stderr)
        return 1
    try:
        status = link.ask("status", None, ServerStatus, 5.0)
    finally:
        link.close()
    if as_json:
        import msgspec

        print(msgspec.json.encode(status).decode())
        return 0
    print(f"{headline(status)} (process {status.pid})")
    if status.models:
        _print_models(status.models)
    else:
        print(NO_MODEL)
    if status.ends_unused:
        print("\nThis process ends with its last model; chatterm stop ends it now.")
    return 0


def headline(status: ServerStatus) -> str:
    """Describe the running server in a line."""
    attached = f"{counted(status.terminals, 'terminal')} attached"
    where = f" at {one_line(status.address)}" if status.address else ", for terminals only"
    what = "Left running by chatterm run" if status.ends_unused else f"chatterm serve{where}"
    return f"{what}; up {duration_text(status.uptime_s)}; {attached}"


def stays_text(stays: Stays) -> str:
    """Return a sentence on the model that a chat leaves loaded, and how to free it."""
    size = bytes_text(stays.bytes)
    if stays.keep_alive_s < 0:
        return f"The model stays loaded ({size}) until chatterm stop."
    return f"The model stays loaded ({size}) for {duration_text(stays.keep_alive_s)}; chatterm stop frees it now."


def stop_server() -> int:
    """Stop the server; return the exit code."""
    link = command_link()
    if link is None:
        print(NONE, file=sys.stderr)
        return 1
    with suppress(ServerGoneError):
        link.ask("end", None, type(None), 5.0)
    until = time.monotonic() + _LEAVE
    while not link.is_lost:
        if time.monotonic() > until:
            raise EngineError("The server is taking long to end; see chatterm ps.")
        time.sleep(0.02)
    print("The chatterm server has ended.")
    return 0


def command_link() -> Link | None:
    """Return a connection to the running server; None if there is none."""
    found = connect_to_server("command")
    return found[0] if found is not None else None


def _row(model: LoadedModel) -> tuple[str, ...]:
    use = []
    if model.users:
        use.append(counted(model.users, "client"))
    if model.running:
        use.append(counted(model.running, "answer"))
    if model.keep_alive_s is None:
        stays = "until the server ends"
    elif model.keep_alive_left_s is None:
        stays = f"{duration_text(model.keep_alive_s)} after its last use"
    else:
        stays = f"{duration_text(model.keep_alive_left_s)} more"
    memory = bytes_text(model.weight_bytes + model.kv_bytes)
    context, used_by = f"{model.context_length:,}", ", ".join(use) or "idle"
    return one_line(model.name), memory, model.device, context, used_by, stays


def _print_models(models: tuple[LoadedModel, ...]) -> None:
    rows = [("Model", "Memory", "Device", "Context", "In use by", "Stays"), *map(_row, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
