"""Threads that read in parallel: a single one copies and checks at a fraction of the rate of the disk and the bus."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class Readers:
    """A pool of daemon threads, so that a disk that hangs does not keep the program from ending."""

    def __init__(self, count: int) -> None:
        """Start up to `count` threads. Raises RuntimeError if the system can start none."""
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._count = 0
        for number in range(count):
            try:
                Thread(target=self._work, name=f"disk-{number}", daemon=True).start()
            except RuntimeError:
                if not number:
                    raise
                break
            self._count += 1

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done by one of the threads."""
        future: Future[T] = Future()
        self._tasks.put((future, work))
        return future

    def close(self) -> None:
        """Let the threads end once all submitted work is done. Does not wait."""
        for _ in range(self._count):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                future.set_exception(error)
