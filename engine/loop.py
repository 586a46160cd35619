"""The one thread that touches the model: it reads the weights, runs the steps and does jobs between them.

Every torch operation belongs here, loading included. Each thread that runs parallel operations gets a team of
OpenMP workers of its own, and with two teams on the cores of one the workers stop spinning: on a small CPU,
decoding in one thread after loading in another runs at half the speed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from engine.errors import EngineError

T = TypeVar("T")


class Loop:
    """Runs `step` as long as `has_work` says so, and jobs from other threads between two steps."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._door = threading.Lock()
        self._has_work: Callable[[], bool] = lambda: False
        self._step: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """No more jobs are taken."""
        return self._closed

    def work(self, has_work: Callable[[], bool], step: Callable[[], None]) -> None:
        """Say what the loop does when there is no job. Both are called on the loop's thread and must not raise."""
        self._has_work, self._step = has_work, step

    def post(self, job: Callable[[], None]) -> None:
        """Have `job` done, and return at once. It must not raise. Raises EngineError once closed."""
        with self._door:  # nothing may be posted after the end, or its poster waits for ever
            if self._closed:
                raise EngineError("The engine is closed; load the model again.")
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

    def close(self) -> None:
        """Do what was posted before, then end the thread. Closing twice is fine."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            while not self._has_work() or not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    return
                job()
            self._step()
