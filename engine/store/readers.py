"""Threads that read side by side: one alone copies and checks at a fraction of what a disk and the bus carry."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class Readers:
    """They do not keep a program from ending, whatever a disk that hangs does to them."""

    def __init__(self, count: int) -> None:
        """Raises RuntimeError where the system gives no thread."""
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
        """Have `work` done by one of them."""
        future: Future[T] = Future()
        self._tasks.put((future, work))
        return future

    def close(self) -> None:
        """They end when all is done."""
        for _ in range(self._count):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it belongs to who waits
                future.set_exception(error)
