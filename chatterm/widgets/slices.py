"""Long work on the screen's thread, such as walking through a whole conversation, done in short slices."""

import asyncio
from collections.abc import Callable, Generator
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

_SLICE = 0.004
"""Seconds of work in a slice, after which keys are handled."""
SOON = 0.004
"""Seconds between two slices of work that the person waits for."""
LATER = 0.02
"""Seconds between two slices of background work."""


async def in_slices(
    work: Generator[None, None, T], pause: float = SOON, between: Callable[[], None] | None = None
) -> T:
    """Run `work` in slices and return its result. It must yield far more often than once a slice.

    `between` is called after every slice but the last, `pause` is in seconds.
    """
    while True:
        deadline = monotonic() + _SLICE
        while monotonic() < deadline:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
        if between is not None:
            between()
        await asyncio.sleep(pause)


def at_once(work: Generator[None, None, T]) -> T:
    """Run all of `work` without a pause and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
