"""Long work, such as going through a whole conversation, done on the screen's thread in short slices."""

import asyncio
from collections.abc import Callable, Generator
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

_SLICE = 0.004
"""Seconds of work in a slice, after which keys get their turn."""
SOON = 0.004
"""Seconds between two slices of work that somebody waits for."""
LATER = 0.02
"""Seconds between two slices of work that nobody waits for."""


async def in_slices(
    work: Generator[None, None, T], pause: float = SOON, between: Callable[[], None] | None = None
) -> T:
    """Do `work`, which yields after each piece, each far shorter than a slice. Return its result.

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
    """Do all of `work` without a pause. Return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
