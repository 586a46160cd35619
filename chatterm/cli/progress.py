"""Shows the progress of a download or a load on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from chatterm.terminal.sanitize import one_line
from chatterm.terminal.spinner import Spinner
from models.progress import OnProgress, Progress
from models.units import bytes_text

if TYPE_CHECKING:
    from rich.console import Console


def bar_console(err: TextIO) -> "Console":
    """Return a console for animations on `err`. It never hides the cursor: after Ctrl+Z it would stay hidden."""
    from rich.console import Console

    class CursorStays(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    return CursorStays(file=err)


@contextmanager
def progress_on(err: TextIO, *, keep: bool = False) -> Iterator[OnProgress]:
    """Yield a callback that shows progress on `err`.

    On a terminal it draws a bar with bytes, rate and time left, which stays afterwards only with `keep`.
    Elsewhere it writes a plain line now and then for a download or a quantisation, and nothing for shorter work.
    """
    if not err.isatty():
        yield PlainLines(err)
        return
    from rich import progress as bars
    from rich.markup import escape

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=None),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(compact=True),
    )
    display = bars.Progress(*columns, console=bar_console(err), transient=not keep)
    spinner = Spinner(err, "Starting")  # until there is progress: importing takes a while, too
    tasks: dict[tuple[str, str], bars.TaskID] = {}

    def report(progress: Progress) -> None:
        if not tasks:
            spinner.stop()
            display.start()
        key = (progress.stage, progress.what)
        if key not in tasks:
            tasks[key] = display.add_task(escape(title(progress)), total=progress.total)
        display.update(tasks[key], completed=progress.done, total=progress.total)

    with spinner:
        try:
            yield report
        finally:
            if display.live.is_started:
                display.stop()


class PlainLines:
    """Writes one line per tenth of a download or a quantisation; if its size is unknown, one every ten seconds."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._err = err
        self._clock = clock
        self._what = ""
        self._started = 0.0
        self._began_at = 0
        self._step = -1

    def __call__(self, progress: Progress) -> None:
        if progress.stage not in ("download", "quantize"):
            return
        now = self._clock()
        if progress.what != self._what:
            self._what, self._started, self._began_at, self._step = progress.what, now, progress.done, -1
        elapsed = now - self._started
        step = progress.done * 10 // progress.total if progress.total else int(elapsed // 10)
        if step == self._step:
            return
        self._step = step
        rate = (progress.done - self._began_at) / elapsed if elapsed > 0 else 0.0
        parts = [f"{title(progress)}: {bytes_text(progress.done)}"]
        if progress.total:
            parts = [f"{title(progress)}: {bytes_text(progress.done)} of {bytes_text(progress.total)}"]
        if rate > 0:
            parts.append(f"{bytes_text(round(rate))}/s")
            if progress.total and progress.done < progress.total:
                parts.append(f"{(progress.total - progress.done) / rate:.0f} s left")
        print(", ".join(parts), file=self._err, flush=True)


def title(progress: Progress) -> str:
    """Describe the work in two words: "Downloading smollm2"."""
    verb = {
        "download": "Downloading",
        "load": "Loading",
        "prepare": "Preparing",
        "check": "Checking",
        "quantize": "Quantising",
    }[progress.stage]
    return f"{verb} {one_line(progress.what, 60)}"
