"""The threads of `asyncio.to_thread`, which may wait for a file system that does not answer any more."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from time import monotonic
from typing import Any

PATIENCE_S = 5.0
"""Seconds at the end for what is being read or written."""


class Threads(ThreadPoolExecutor):
    """Runs each call on a thread of its own. At the end those that have not ended in time are left.

    A ThreadPoolExecutor, which asyncio insists on, would wait for them, and so would Python after it.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._running: list[Thread] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> "Future[Any]":
        future = Future[Any]()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args, **named))
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    future.set_exception(error)

        thread = Thread(target=run, name="in thread", daemon=True)
        self._running = [other for other in self._running if other.is_alive()]
        thread.start()
        self._running.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        until = monotonic() + PATIENCE_S
        for thread in self._running if wait else ():
            thread.join(max(until - monotonic(), 0.0))

    @property
    def are_left(self) -> bool:
        """Whether any has not ended."""
        return any(thread.is_alive() for thread in self._running)
