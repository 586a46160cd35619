"""`chatterm top`: the activity of the running server, once a second."""

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from chatterm.backends.protocol import ServerStatus
from chatterm.cli.servers import NO_MODEL, NONE, command_link, headline
from chatterm.ipc.link import Link, ServerGoneError
from chatterm.server.service import Latency, Metrics, ModelMetrics
from chatterm.terminal.console import console_keys
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.signals import ENDING, heeded
from models.units import bytes_text, counted

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY = 1.0
"""Seconds between samples."""
_WINDOW = 5
"""The most samples that a rate goes back."""
_PATIENCE = 5.0
_CONSOLE_S = 0.05
"""Seconds between two looks at a Windows console's keyboard."""
_LABEL, _COLUMN = 24, 15
"""Characters: the width of the row titles, and the least width of a model's column with the gap before it."""


class StatusSample(Struct, frozen=True):
    """The server's state at `time`, in seconds of a monotonic clock."""

    time: float
    server: ServerStatus
    metrics: Metrics


class ModelRate(Struct, frozen=True):
    """Tokens per second of one model."""

    prompt: float
    """Prompt tokens, without those found in the cache."""
    generated: float


class TopView(Struct, frozen=True):
    """What is shown: the latest sample, and each model's rates since an earlier one."""

    server: ServerStatus
    metrics: Metrics
    rates: dict[str, ModelRate]


def watch(*, once: bool, as_json: bool, every: float = EVERY) -> int:
    """Show the server's activity until the person or the server ends it; return the exit code."""
    link = command_link()
    if link is None:
        print(NONE, file=sys.stderr)
        return 1
    try:
        if once or as_json:
            _print_views(link, once, as_json, every)
        else:
            _live(link, every)
    except ServerGoneError as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader of the lines is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        link.close()
    return 0


def look(link: Link) -> StatusSample:
    """Take a sample of the server. Raises ServerGoneError, and EngineError if it does not answer."""
    status = link.ask("status", None, ServerStatus, _PATIENCE)
    return StatusSample(time.monotonic(), status, link.ask("metrics", None, Metrics, _PATIENCE))


def make_view(looks: Sequence[StatusSample]) -> TopView:
    """Return the latest sample, with rates since the earliest; a model that was not loaded then has none."""
    first, last = looks[0], looks[-1]
    before = {model.model: model for model in first.metrics.models}
    seconds = last.time - first.time
    rates = {
        model.model: ModelRate(
            max(_computed(model) - _computed(before[model.model]), 0) / seconds,
            max(model.generated_tokens - before[model.model].generated_tokens, 0) / seconds,
        )
        for model in last.metrics.models
        if model.model in before and seconds > 0
    }
    return TopView(last.server, last.metrics, rates)


def table(view: TopView, width: int) -> "RenderableType":
    """Lay out at most 22 lines of `width` columns: a row for each figure, a column for each model that fits."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(headline(view.server), no_wrap=True, overflow="ellipsis")
    models = view.metrics.models
    if not models:
        return Group(head, Text(f"\n{NO_MODEL}"))
    shown = models[: max((width - _LABEL) // _COLUMN, 1)]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=_LABEL)
    for _ in shown:
        grid.add_column(no_wrap=True, overflow="ellipsis", min_width=_COLUMN - 2)
    grid.add_row("", *(Text(one_line(model.model), style="bold") for model in shown))
    columns = [_figures(model, view.rates.get(model.model)) for model in shown]
    for title in columns[0]:
        grid.add_row(title, *(column[title] for column in columns))
    more = len(models) - len(shown)
    foot = Text(f"\n{counted(more, 'more model')}; see chatterm ps.", no_wrap=True)
    return Group(head, Text(""), grid, *([foot] if more else []))


def _figures(model: ModelMetrics, rate: ModelRate | None) -> dict[str, str]:
    """Return titles → figures, in order; a blank title is a blank line."""
    share = model.cached_tokens / model.prompt_tokens if model.prompt_tokens else None
    first, between = model.first_token, model.between_tokens
    return {
        "Weights": bytes_text(model.weight_bytes),
        "KV cache": bytes_text(model.kv_bytes),
        "KV cache in use": f"{model.kv_usage:.0%}",
        "Prefix hits": "-" if share is None else f"{share:.0%}",
        "": "",
        "Clients": f"{model.users:,}",
        "Running": f"{model.running:,}",
        "Waiting": f"{model.waiting:,}",
        "Preempted": f"{model.preempted:,}",
        " ": "",
        "Prompt tokens/s": "-" if rate is None else f"{rate.prompt:,.0f}",
        "Answer tokens/s": "-" if rate is None else f"{rate.generated:,.0f}",
        "  ": "",
        "Time to first token, p50": _time(first, "p50"),
        "Time to first token, p99": _time(first, "p99"),
        "Between tokens, p50": _time(between, "p50"),
        "Between tokens, p99": _time(between, "p99"),
    }


def _time(latency: Latency | None, name: str) -> str:
    if latency is None:
        return "-"
    seconds = getattr(latency, name)
    return f"{seconds:.1f} s" if seconds >= 9.95 else f"{seconds * 1000:,.{0 if seconds >= 0.1 else 1}f} ms"


def _computed(model: ModelMetrics) -> int:
    return model.prompt_tokens - model.cached_tokens


def _print_views(link: Link, once: bool, as_json: bool, every: float) -> None:
    """Print a view each `every` seconds. Rates need two samples, so the first view is delayed."""
    import msgspec
    from rich.console import Console

    looks = deque([look(link)], maxlen=_WINDOW + 1)
    while True:
        time.sleep(every)
        looks.append(look(link))
        view = make_view(looks)
        if as_json:
            print(msgspec.json.encode(view).decode(), flush=True)
        else:
            console = Console(highlight=False)
            console.print(table(view, console.width))
        if once:
            return


def _live(link: Link, every: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    looks = deque([look(link)], maxlen=_WINDOW + 1)
    console = Console(highlight=False)

    def screen() -> "RenderableType":
        return Group(table(make_view(looks), console.width), Text("\nq ends this view.", style="dim"))

    # The view is closed before a message says why.
    with (
        _signals(),
        _keys() as pressed,
        Live(screen(), console=console, screen=True, auto_refresh=False) as live,
    ):
        while not pressed(every):
            looks.append(look(link))
            live.update(screen(), refresh=True)


@contextmanager
def _signals() -> Iterator[None]:
    """Make a signal to end close the view first, and Ctrl+Z, which would leave it on the terminal, do nothing."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in heeded(*ENDING)}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in heeded("SIGTSTP")}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _no_key(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _console_key(seconds: float) -> bool:
    """Wait on a Windows console; return True as soon as q is pressed."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if "q" in console_keys().lower():
            return True
        time.sleep(min(left, _CONSOLE_S))
    return False


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits the given seconds, and returns early, with True, when q is pressed."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield _no_key
        return
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield _console_key
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([keyboard], [], [], max(until - time.monotonic(), 0.0))[0]:
            typed = os.read(keyboard, 64)
            if not typed or b"q" in typed.lower():
                return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
