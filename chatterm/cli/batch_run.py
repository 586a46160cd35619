"""Runs a batch: requests are read as they are needed, results written in their order."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from stat import S_ISREG
from time import monotonic
from typing import BinaryIO, TextIO

from chatterm.backends.arrivals import rate
from chatterm.backends.backend import Backend, EngineError, Outcome, Part, Request, TokenEvent
from chatterm.cli.oneshot import say_notes, write
from chatterm.cli.progress import bar_console, progress_on
from chatterm.cli.requests import BatchRequest, InputLine, parse_request, read_lines, result_line
from chatterm.cli.results import Results
from chatterm.cli.wait_notices import waits_told
from chatterm.conversation.figures import rate_text, seconds_text
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.spinner import has_colour
from chatterm.terminal.wording import sentences
from models.units import counted

_TELL = 0.1
"""Seconds between updates of the progress."""


class Batch:
    """Reads requests as they are needed and writes results in their order."""

    def __init__(
        self,
        backend: Backend,
        source: BinaryIO,
        results: Results,
        settings: bytes = b"",
        err: TextIO | None = None,
    ) -> None:
        """Start a batch. `settings` encodes what answers depend on besides the lines of `source`."""
        self._backend = backend
        self._results = results
        self._lines = read_lines(source, settings)
        self._size = _file_size(source)
        self._err = err or sys.stderr
        self._asked: dict[int, tuple[int, InputLine, BatchRequest]] = {}
        """The backend's number of a request → its place in the output, its line and the parsed request."""
        self._held: dict[int, tuple[bytes, int]] = {}
        """Place → a result that waits for earlier ones, and where its input line ends, in bytes."""
        self._next = self._placed = self._given = 0
        self._read = 0
        """Bytes of the input whose results are written."""
        self.done = self.errors = self.tokens = self._generated = 0
        self._began = monotonic()

    def answer(self) -> None:
        """Answer the requests that have no result yet. The backend is closed in the end.

        Raises EngineError for what stops the whole batch. On KeyboardInterrupt it first tells how to continue.
        """
        earlier, errors = self._results.resume(self._lines)
        self.done, self.errors = earlier, errors
        first = next(self._lines, None)
        if first is None:
            if not earlier:
                raise EngineError('There are no requests; write one a line, like {"prompt": "..."}.')
            write(
                self._err, f"Nothing to do: {self._results.name} has {counted(earlier, 'result')} already.\n"
            )
            return
        try:
            with progress_on(self._err) as on_progress:
                self._backend.open(on_progress)
            say_notes(self._backend, set(), self._err)
            self._results.begin()
            gc.freeze()  # a full collection over all modules would stop every stream for 0.2 s
            self._began = monotonic()
            with (
                self._progress() as (tell, say),
                waits_told(self._backend, say),
                closing(self._backend.answers(self._requests(first))) as parts,  # type: ignore[type-var]
            ):
                for number, part in parts:
                    self._take(number, part)
                    tell()
        except KeyboardInterrupt:
            write(self._err, f"Stopped. {self._where()}\n")
            raise
        except EngineError as error:
            raise EngineError(sentences(str(error), self._where())) from error
        finally:
            gc.unfreeze()
            self._backend.close()
        self._say_end(earlier)

    def _requests(self, first: InputLine) -> Iterator[Request]:
        line: InputLine | None = first
        while line is not None:
            asked, place = parse_request(line), self._placed
            self._placed += 1
            if asked.request is None:
                self._put(place, line, asked, asked.problem)
            else:
                self._asked[self._given] = (place, line, asked)
                self._given += 1
                yield asked.request
            line = next(self._lines, None)

    def _take(self, number: int, part: Part) -> None:
        if isinstance(part, TokenEvent):
            self.tokens += 1
        elif isinstance(part, Exception):
            self._put(*self._asked.pop(number), one_line(str(part)))
        elif part.finish_reason is not None:
            self._generated += part.stats.generated_tokens
            self._put(*self._asked.pop(number), part)

    def _put(self, place: int, line: InputLine, asked: BatchRequest, outcome: Outcome | str) -> None:
        """Write a result as soon as all results before it are written."""
        self.errors += isinstance(outcome, str)
        self._held[place] = (result_line(line, asked, outcome), line.end)
        while (ready := self._held.pop(self._next, None)) is not None:
            self._results.write(ready[0])
            self._next, self.done, self._read = self._next + 1, self.done + 1, ready[1]

    # --- messages ---

    def _where(self) -> str:
        """Return a sentence on how many results are written and how to continue."""
        if not self._results.is_file:
            return f"{counted(self.done, 'result')} written."
        name = self._results.name
        return f"{counted(self.done, 'result')} in {name}; run the same command again to continue."

    def _say_end(self, earlier: int) -> None:
        took = monotonic() - self._began
        parts = [
            counted(self.done, "request"),
            counted(self.errors, "error"),
            counted(self._generated, "token"),
        ]
        if tokens_per_s := rate(self._generated, took):
            parts.append(rate_text(tokens_per_s))
        parts.append(seconds_text(took))
        before = f" ({earlier:,} of them done before)" if earlier else ""
        write(self._err, f"{parts[0]}{before}, {', '.join(parts[1:])}.\n")

    @contextmanager
    def _progress(self) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
        """Yield two functions: one to call often, which updates the progress shown on a terminal; and one that writes a
        line beside it."""
        if not has_colour(self._err):
            yield lambda: None, lambda line: write(self._err, f"{line}\n")
            return
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=None),
            bars.TaskProgressColumn(),
        )
        display = bars.Progress(
            *columns, bars.TimeRemainingColumn(compact=True), console=bar_console(self._err), transient=True
        )
        task = display.add_task("Answering", total=self._size)
        told = self._began

        def tell() -> None:
            nonlocal told
            now = monotonic()
            if now - told >= _TELL:
                told = now
                tokens_per_s = rate(self.tokens, now - self._began)
                at = f" · {rate_text(tokens_per_s)}" if tokens_per_s else ""
                display.update(task, completed=self._read, description=f"{counted(self.done, 'result')}{at}")

        with display:
            yield tell, lambda line: display.console.print(line, markup=False, highlight=False)


def _file_size(source: BinaryIO) -> int | None:
    """Return the size of a file in bytes; None if it is not a regular file."""
    try:
        state = os.fstat(source.fileno())
    except (OSError, ValueError):
        return None
    return state.st_size if S_ISREG(state.st_mode) else None
