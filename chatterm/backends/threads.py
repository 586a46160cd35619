"""The threads of `asyncio.to_thread`, which may be waiting for a file system that no longer answers."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from time import monotonic
from typing import Any

PATIENCE_S = 5.0
"""How long the end of the program waits for reads and writes in progress, in seconds."""


class Threads(ThreadPoolExecutor):
    """Runs each call on a thread of its own. At the end, calls that do not finish in time are abandoned.

    asyncio requires a ThreadPoolExecutor, but that would wait for all of them, and so would Python when it exits.
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
                except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
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
        """Whether any call is still running."""
        return any(thread.is_alive() for thread in self._running)
