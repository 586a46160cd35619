"""The one thread that touches the model: it loads the weights, runs the steps and does jobs between them.

Every torch operation belongs here, including loading. Each thread that runs parallel operations gets its own team of
OpenMP workers, and workers of two teams that share the cores stop spinning: on a small CPU, decoding in one thread
after loading in another runs at half the speed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic
from typing import TypeVar

from engine.errors import EngineError, GpuLostError
from engine.execute.faults import lost_gpu, never_free

T = TypeVar("T")


class Loop:
    """Runs `step` while `has_work` is true, jobs from other threads between two steps, and otherwise idle work."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed: EngineError | None = None
        # Reentrant: its holder may run the garbage collector, and a collected object may post a job.
        self._door = threading.RLock()
        self._has_work: Callable[[], bool] = lambda: False
        self._step: Callable[[], None] = lambda: None
        self._end: Callable[[EngineError | None], None] = lambda _: None
        self._idle: Callable[[], bool] = lambda: False
        self._began: float | None = None
        """When the running step or job began; None while there is nothing to do."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether the loop takes no more jobs."""
        return self._closed is not None

    @property
    def lost_gpu(self) -> bool:
        """Whether the loop has ended because the GPU was lost."""
        return isinstance(self._closed, GpuLostError)

    @property
    def busy_s(self) -> float:
        """Seconds since the running step or job began; 0 while there is nothing to do. For any thread."""
        began = self._began
        return 0.0 if began is None else monotonic() - began

    @property
    def inside(self) -> bool:
        """Whether the caller is on the loop's thread, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def work(
        self,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        end: Callable[[EngineError | None], None],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set what the loop does when there is no job, and at its end.

        All functions are called on the loop's thread. `end` gets the error that ended the thread, or None if it was
        closed. `idle` is called when there is neither a job nor a step, and again while it returns True for more to do;
        each call is short.
        """
        self._has_work, self._step, self._end, self._idle = has_work, step, end, idle

    def post(self, job: Callable[[], None]) -> None:
        """Have `job` run, and return at once. It must not raise. Raises EngineError once closed."""
        with self._door:  # a job posted after the end would never run, and its poster would wait forever
            if self._closed is not None:
                raise type(self._closed)(*self._closed.args)
            self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop's thread; return its result or raise its error. Raises EngineError once closed."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the error belongs to the caller
                future.set_exception(error)

        self.post(job)
        return future.result()

    def fail(self, reason: EngineError) -> None:
        """End the thread with `reason`, the error that all waiting and all later callers get. For any thread."""

        def job() -> None:
            raise reason

        with suppress(EngineError):  # it has ended
            self.post(job)

    def close(self) -> None:
        """Run the jobs posted before, then end the thread. Closing twice is harmless."""
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
        except BaseException as error:  # noqa: BLE001 - callers must learn of any error
            failure = error if isinstance(error, EngineError) else lost_gpu(error)
            failure = failure or EngineError(
                f"The engine stopped after an unexpected error ({error!r:.200}); load the model again."
            )
            self._shut(failure)
            if self.lost_gpu:
                never_free(self)
            while (job := self._jobs.get()) is not None:
                job()
        self._end(failure)

    def _serve(self) -> None:
        while True:
            while not self._has_work() or not self._jobs.empty():
                while self._jobs.empty() and self._idle():
                    self._began = monotonic()
                self._began = None
                job = self._jobs.get()
                if job is None:
                    return
                self._began = monotonic()
                job()
            self._began = monotonic()
            self._step()
