"""What has to go through all of a conversation does so here: on the screen's thread, but never for long."""

import asyncio
from collections.abc import Callable, Generator
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

_SLICE = 0.004
"""Seconds of work between two looks at the keyboard."""
SOON = 0.004
"""Seconds for everything else between two slices of work that somebody waits for."""
LATER = 0.02
"""The same for work that nobody waits for."""


async def in_slices(
    work: Generator[None, None, T], pause: float = SOON, between: Callable[[], None] | None = None
) -> T:
    """Do `work`, which yields after each piece, each far shorter than a slice; what it returns.

    `between` is called where a slice ends before the work does.
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
    """Do all of `work`; what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
