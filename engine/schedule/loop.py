"""The one thread that touches the model: it reads the weights, runs the steps and does jobs between them.

Every torch operation belongs here, loading included. Each thread that runs parallel operations gets a team of
OpenMP workers of its own, and with two teams on the cores of one the workers stop spinning: on a small CPU,
decoding in one thread after loading in another runs at half the speed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from engine.errors import EngineError

T = TypeVar("T")


class Loop:
    """Runs `step` as long as `has_work` says so, and jobs from other threads between two steps; else what can wait."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed: EngineError | None = None
        # Reentrant: whoever holds it may collect garbage, and what is collected may post a job.
        self._door = threading.RLock()
        self._has_work: Callable[[], bool] = lambda: False
        self._step: Callable[[], None] = lambda: None
        self._end: Callable[[EngineError | None], None] = lambda _: None
        self._idle: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """No more jobs are taken."""
        return self._closed is not None

    @property
    def inside(self) -> bool:
        """Whether the caller is on the loop's thread, where nobody may wait for the loop."""
        return threading.current_thread() is self._thread

    def work(
        self,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        end: Callable[[EngineError | None], None],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """Say what the loop does when there is no job, and what it does last of all.

        All are called on the loop's thread. `end` gets the error that ended the thread, None when it was closed. `idle`
        is called when there is neither a job nor a step, and again while it says that more is left; it is short.
        """
        self._has_work, self._step, self._end, self._idle = has_work, step, end, idle

    def post(self, job: Callable[[], None]) -> None:
        """Have `job` done, and return at once. It must not raise. Raises EngineError once closed."""
        with self._door:  # nothing may be posted after the end, or its poster waits for ever
            if self._closed is not None:
                raise EngineError(*self._closed.args)
            self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> T:
        """Have `function` called, and return what it returns or raise what it raises."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)

        self.post(job)
        return future.result()

    def fail(self, reason: EngineError) -> None:
        """End the thread because of `reason`, which whoever waits and whoever asks later is told. From any thread."""

        def job() -> None:
            raise reason

        with suppress(EngineError):  # it has ended
            self.post(job)

    def close(self) -> None:
        """Do what was posted before, then end the thread. Closing twice is fine."""
        self._shut(EngineError("The engine is closed; load the model again."))
        self._thread.join()

    def _shut(self, reason: EngineError) -> None:
        with self._door:
            if self._closed is None:
                self._closed = reason
                self._jobs.put(None)

    def _run(self) -> None:
        failure = None
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - whatever it is, callers must hear of it
            failure = error if isinstance(error, EngineError) else None
            failure = failure or EngineError(
                f"The engine stopped after an unexpected error ({error!r:.200}); load the model again."
            )
            self._shut(failure)
            while (job := self._jobs.get()) is not None:
                job()
        self._end(failure)

    def _serve(self) -> None:
        while True:
            while not self._has_work() or not self._jobs.empty():
                while self._jobs.empty() and self._idle():
                    pass
                job = self._jobs.get()
                if job is None:
                    return
                job()
            self._step()
