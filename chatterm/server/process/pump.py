"""From the threads of engines to connections: what a stream has to say, at most one frame every 10 ms.

Frames cost both processes time, those of 256 streams more than there is. So the more streams there are, the longer each
gathers: all of them together have a bounded number of frames a second.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol

INTERVAL = 0.010
"""Seconds between two frames of a stream, at least."""
FRAMES = 3000
"""Frames a second of all streams, but for the first and the last of each."""


class Source(Protocol):
    """A stream that has something to say now and then. `waits` and `due` belong to the pump."""

    waits: bool
    due: float

    def send(self) -> bool:
        """Send all there is. On the event loop's thread. Returns whether more may follow."""

    def fail(self, error: Exception) -> None:
        """Sending has failed: this is its end."""


class Pump:
    """Has streams send what they have: the first thing at once, what comes soon after it together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fresh: deque[Source] = deque()
        self._early: list[Source] = []
        """They have sent something just now."""
        self._called = False
        self._hurries = False
        """Somebody of those has come to its end."""
        self._timer: asyncio.TimerHandle | None = None
        self._live: set[Source] = set()
        """They have sent something, and their end is yet to come."""

    def left(self, source: Source) -> None:
        """`source` has come to its end. On the event loop's thread."""
        self._live.discard(source)

    def wake(self, source: Source, at_once: bool = False) -> None:
        """`source` has something to say; `at_once`: it waits for no more, for that is its end. From any thread."""
        if at_once:
            source.due = 0.0
            self._hurries = True
        elif source.waits:
            return
        if not source.waits:
            source.waits = True
            self._fresh.append(source)
        if not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._called = False
        if self._hurries:
            self._hurries = False
            self._fresh.extend(self._early)
            self._early = []
        now = self._loop.time()
        for _ in range(len(self._fresh)):
            source = self._fresh.popleft()
            if source.due > now:
                self._early.append(source)
            else:
                self._send(source, now)
        if self._early and self._timer is None:
            self._timer = self._loop.call_at(min(source.due for source in self._early), self._again)

    def _again(self) -> None:
        self._timer = None
        early, self._early = self._early, []
        self._fresh.extend(early)
        self._run()

    def _send(self, source: Source, now: float) -> None:
        source.waits = False  # before it looks: what comes from now on wakes it again
        self._live.add(source)
        source.due = now + max(INTERVAL, len(self._live) / FRAMES)
        goes_on = False
        try:
            goes_on = source.send()
        except Exception as error:  # noqa: BLE001 (whatever it is, the others are served)
            source.fail(error)
        if not goes_on:
            self._live.discard(source)
