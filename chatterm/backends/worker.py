"""The one thread that talks to the backend, and the mailbox between it and the screen.

The screen submits jobs and takes reports; neither side ever waits for the other.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec

from chatterm.backends.backend import (
    Backend,
    ContextFullError,
    EngineError,
    FinishReason,
    ModelError,
    ModelInfo,
    OnProgress,
    Outcome,
    Part,
    Progress,
    TokenEvent,
)
from chatterm.backends.calls import KINDS
from chatterm.terminal.error_log import error_line, write_down
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.wording import in_chat

P = ParamSpec("P")

_SWITCH = 0.0001
"""Seconds after which a computing thread yields to one that waits for the interpreter.

Python's default of 5 ms is as long as ten tokens of a GPU, which idles while the engine's thread cannot continue. With
a step of 450 us the chat screen got 65% of the tokens/s of the bare loop at 5 ms, 83% at 0.5 ms, 93% at 0.1 ms, and no
more at 0.05 ms.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A call of a method of the backend."""

    method: str
    arguments: tuple[Any, ...] = ()


# --- reports to the screen ---


@dataclass(frozen=True, slots=True)
class LoadProgress:
    progress: Progress


@dataclass(frozen=True, slots=True)
class Loaded:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """Tokens follow from now on."""

    before: Outcome
    """The answer without them: empty, or the answer that is continued."""
    index: int = 0
    """The number of the candidate, as in `Token` and `Answered`."""


@dataclass(frozen=True, slots=True)
class Token:
    time: float
    """When the token arrived, by `time.monotonic()`."""
    event: TokenEvent
    index: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    outcome: Outcome | None
    index: int = 0
    problem: str = ""
    """Why this one of several answers has no outcome, in one line."""


@dataclass(frozen=True, slots=True)
class JobDone:
    job: Job
    value: object = None


@dataclass(frozen=True, slots=True)
class JobFailed:
    job: Job
    message: str
    """One line."""
    too_many: int = 0
    """Tokens by which it does not fit into the context; 0: something else is wrong."""


@dataclass(frozen=True, slots=True)
class AsideText:
    """The text of an aside so far; JobDone or JobFailed follows at its end."""

    text: str


Report = LoadProgress | Loaded | AnswerBegan | Token | Answered | JobDone | JobFailed | AsideText


class _Closing(BaseException):
    """Leaves a running load. Not an Exception, so that no handler mistakes it for a failure."""


class _Abandoned(BaseException):
    """The user no longer wants to wait for a load."""


class Worker:
    """Runs jobs in order, one answer at a time. Its public methods are for the screen's thread only."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._reports: deque[Report] = deque()
        self._progress: Progress | None = None
        self._closing = threading.Event()
        self._stopping = threading.Event()
        self._but: int | None = None
        """The candidate that is not to be stopped."""
        self._abandoning = threading.Event()
        self._aside: Job | None = None
        """The latest aside; None once another job was submitted."""
        self._drafts: dict[str, Job] = {}
        """The latest job of each method about a draft: earlier ones that still wait are outdated."""
        self._is_loading = False
        # A daemon thread: a load that cannot be interrupted must not block the terminal.
        self._thread = threading.Thread(target=self._loop, name="chatterm-worker", daemon=True)

    def start(self) -> None:
        """Start to run jobs. From now on the threads of this process switch more often (see `_SWITCH`)."""
        sys.setswitchinterval(_SWITCH)
        self._thread.start()

    def submit(
        self, method: Callable[Concatenate[Any, P], object], /, *arguments: P.args, **named: P.kwargs
    ) -> None:
        """Have a method of Backend called, without `on_progress`, which is the worker's own."""
        job = Job(method.__name__, (*arguments, *named.values()))
        kind = KINDS[job.method]
        if kind in ("answer", "several"):
            self._stopping.clear()
        if kind == "draft":
            self._drafts[job.method] = job
        self.stop_aside()
        if kind == "aside":
            self._aside = job
        self._jobs.put(job)

    def stop_aside(self) -> None:
        """End the aside: its text is no longer wanted."""
        aside, self._aside = self._aside, None
        if aside is not None:
            self._backend.stop()

    def stop(self, but: int | None = None) -> None:
        """End the latest answer, even if it has not begun; of candidates, end all, or all `but` one."""
        self._but = but
        self._stopping.set()
        self._backend.stop(but)

    def abandon(self) -> None:
        """Leave the running download or load at its next progress report; it ends with JobFailed."""
        if self._is_loading:
            self._abandoning.set()

    def answer_now(self) -> None:
        """End the thinking of the running answer."""
        self._backend.answer_now()

    def take(self, limit: int = 10_000) -> list[Report]:
        """Return the reports since the last call, oldest first, at most `limit` of them."""
        taken: list[Report] = []
        while self._reports and len(taken) < limit:
            taken.append(self._reports.popleft())
        progress, self._progress = self._progress, None
        if progress is not None and not any(isinstance(report, Loaded | JobFailed) for report in taken):
            taken.append(LoadProgress(progress))
        return taken

    def close(self) -> bool:
        """End the running job and free the backend; return False if it does not end soon."""
        self._closing.set()
        timeout = 0.3 if self._is_loading else 5.0
        self._backend.stop()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            try:
                self._run(job)
            except _Closing:
                break
            except _Abandoned:
                self._reports.append(JobFailed(job, "Loading was stopped; what was downloaded is kept."))
            except (EngineError, ModelError) as error:
                too_many = (
                    max(error.needed - error.available, 1) if isinstance(error, ContextFullError) else 0
                )
                said = str(error) if KINDS[job.method] == "aside" else in_chat(error)
                self._reports.append(JobFailed(job, one_line(said), too_many))
            except Exception as error:  # noqa: BLE001 - the chat continues after any error
                said = f"{error_line(error)} The chat continues. {write_down(error)}"
                self._reports.append(JobFailed(job, said))
        with contextlib.suppress(Exception):  # there is nobody left to tell
            self._backend.close()

    def _run(self, job: Job) -> None:
        call = partial(getattr(self._backend, job.method), *job.arguments)
        value: object = None
        match KINDS[job.method]:
            case "load":
                self._load(call)
            case "answer":
                self._answer(call())
            case "several":
                self._draw(call())
            case "aside":
                value = self._say_aside(job, call)
            case "draft" if self._drafts[job.method] is not job:
                pass
            case "title" if not self._jobs.empty():
                value = True
            case _:
                value = call()
        self._reports.append(JobDone(job, value))

    def _load(self, load: Callable[[OnProgress], None]) -> None:
        self._abandoning.clear()
        self._is_loading = True
        try:
            load(self._on_progress)
        finally:
            self._is_loading = False
        info = self._backend.info
        if info is not None:
            self._reports.append(Loaded(info))

    def _answer(self, events: Iterator[TokenEvent]) -> None:
        begun = False
        for event in events:
            if not begun and (latest := self._backend.last) is not None:
                self._reports.append(AnswerBegan(latest.before(event)))
            begun = True
            self._reports.append(Token(time.monotonic(), event))
            if self._closing.is_set():
                raise _Closing
            if self._stopping.is_set():
                self._backend.stop()  # stop came before the backend had begun
        self._reports.append(Answered(self._backend.last))
        if self._jobs.empty():
            self._backend.settle()

    def _draw(self, parts: Iterator[tuple[int, Part]]) -> None:
        """Report candidates. An error ends its own candidate, and is raised once the others are done."""
        problem: EngineError | ModelError | None = None
        for index, part in parts:
            if isinstance(part, TokenEvent):
                self._reports.append(Token(time.monotonic(), part, index))
            elif isinstance(part, EngineError | ModelError):
                problem = part
                self._reports.append(Answered(None, index, one_line(in_chat(part))))
            elif part.finish_reason is None:
                self._reports.append(AnswerBegan(part, index))
            else:
                self._reports.append(Answered(part, index))
            if self._closing.is_set():
                raise _Closing
            if self._stopping.is_set():
                self._backend.stop(self._but)  # stop came before the backend had begun
        if problem is not None:
            raise problem
        if self._jobs.empty():
            self._backend.settle()

    def _say_aside(self, job: Job, answers: Callable[[], Iterator[tuple[int, Part]]]) -> bool:
        """Run an aside; return whether it was completed."""
        if self._aside is not job:
            return False
        text = ""
        reason: FinishReason | None = None
        try:
            for _, part in answers():
                if isinstance(part, EngineError | ModelError):
                    raise part
                if isinstance(part, TokenEvent):
                    text += part.text if part.kind == "answer" else ""
                    self._reports.append(AsideText(text))
                else:
                    reason = part.finish_reason
                if self._closing.is_set():
                    raise _Closing
                if self._aside is not job:
                    self._backend.stop()  # stop came before the backend had begun
        finally:
            if self._aside is job:
                self._aside = None
        return reason in (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)

    def _on_progress(self, progress: Progress) -> None:
        if self._closing.is_set():
            raise _Closing
        if self._abandoning.is_set():
            raise _Abandoned
        self._progress = progress  # only the latest counts: the screen looks 30 times a second
