"""Threads for the work around answers: clients take turns, and long work never holds up short work."""

import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
Job = Callable[[], None]

_SHORT, _LONG = 4, 1
"""Threads for short and for long work."""
_NICE = 5
"""How much less the system favours threads with long work, as setpriority(2) counts."""


class _Queues:
    """Runs jobs in some threads. Each client has its own queue, and the queues take turns."""

    def __init__(self, threads: int, name: str, nice: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name, _lower_priority, (nice,))
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()

    def add(self, client: str, job: Job) -> None:
        """Queue a job. Raises RuntimeError after `close`."""
        with self._lock:
            self._jobs.setdefault(client, deque()).append(job)
        self._pool.submit(self._run_next)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            client, jobs = next(iter(self._jobs.items()))
            job = jobs.popleft()
            if jobs:
                self._jobs.move_to_end(client)
            else:
                del self._jobs[client]
        job()


class Workers:
    """Threads for short work, and one of low priority for long work."""

    def __init__(self) -> None:
        self._short = _Queues(_SHORT, "request", 0)
        self._long = _Queues(_LONG, "long request", _NICE)

    def submit(
        self, client: str | None, work: Callable[..., T], *arguments: Any, is_long: bool = False
    ) -> "Future[T]":
        """Run `work` in a thread when it is this client's turn. Raises RuntimeError after `close`."""
        result: Future[T] = Future()

        def job() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(work(*arguments))
            except BaseException as error:  # noqa: BLE001 (whoever waits for the result is told)
                result.set_exception(error)

        (self._long if is_long else self._short).add(client or "", job)
        return result

    def close(self) -> None:
        """Begin nothing more; what is running ends by itself."""
        self._short.close()
        self._long.close()


def _lower_priority(nice: int) -> None:
    """Lower the priority of this thread, where threads have priorities of their own."""
    if nice and sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + nice)
