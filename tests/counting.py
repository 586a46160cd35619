"""Replacements for a clock: a test counts work, or waits for an event as long as it takes."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGALRM, alarm, signal
from time import monotonic, sleep

PATIENCE = 120.0
"""Seconds after which an event counts as missing: far more than it ever takes, so it only ends a test that hangs."""


def calls_in(work: Callable[[], object]) -> int:
    """Return how many functions, Python's and C's, this thread calls during `work`: the same on every machine."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def until(condition: Callable[[], object], pause: float = 0.002) -> None:
    """Wait for `condition`. Fail if it does not become true."""
    end = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < end, "it does not happen"
        sleep(pause)


async def until_true(condition: Callable[[], object], pause: float = 0.002) -> None:
    """Wait for `condition` while the event loop goes on. Fail if it does not become true."""
    end = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < end, "it does not happen"
        await asyncio.sleep(pause)


@contextmanager
def patience() -> Iterator[None]:
    """Fail if the code inside hangs. Only for the main thread, and for code in Python."""

    def hangs(*_: object) -> None:
        raise AssertionError("it does not end")

    before = signal(SIGALRM, hangs)
    alarm(int(PATIENCE))
    try:
        yield
    finally:
        alarm(0)
        signal(SIGALRM, before)
