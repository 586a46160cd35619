"""From the threads of engines to connections: what a stream has to say, at most one frame every 10 ms.

Frames cost both processes time, those of 256 streams more than there is. So the more streams there are, the longer each
gathers: all of them together have a bounded number of frames a second.

    engine's thread | first token: wakes the event loop | more: noted       | more: noted  | the end: wakes it
    event loop      | sends it                          | its time: sends   | ...          | sends the rest

Waking the event loop costs the engine's thread a system call, and the interpreter's lock with it. So it is done where
something may be sent now; what comes sooner is only noted, for a timer runs until then.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol

INTERVAL = 0.010
"""Seconds between two frames of a stream, at least."""
FRAMES = 3000
"""Frames a second of all streams, but for the first and the last of each."""
TICK = 0.005
"""Streams may send again at multiples of so many seconds, so that many do at once."""


class FrameSource(Protocol):
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
        self._fresh: deque[FrameSource] = deque()
        """They have something to say. From any thread."""
        self._early: set[FrameSource] = set()
        """Of those that have been looked at the ones that have sent something just now."""
        self._called = False
        self._timer: asyncio.TimerHandle | None = None
        self._live: set[FrameSource] = set()
        """They have sent something, and their end is yet to come."""

    def left(self, source: FrameSource) -> None:
        """`source` has come to its end. On the event loop's thread."""
        self._live.discard(source)

    def wake(self, source: FrameSource, at_once: bool = False) -> None:
        """`source` has something to say; `at_once`: it waits for no more, for that is its end. From any thread."""
        if at_once:
            source.due = 0.0
        elif source.waits:
            return
        source.waits = True
        self._fresh.append(source)
        # After it was noted: else the timer that is to see it could run in between.
        is_due = at_once or source.due <= self._loop.time() + TICK / 2
        if is_due and not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._called = False
        now = self._loop.time()
        for _ in range(len(self._fresh)):
            source = self._fresh.popleft()
            if not source.waits:  # it was noted twice, and has been served
                continue
            if source.due > now:
                self._early.add(source)
                self._expect(source.due)
            else:
                self._send(source, now)

    def _tick(self) -> None:
        """Whoever has sent something may again."""
        self._timer = None
        early, self._early = self._early, set()
        self._fresh.extend(early)
        self._run()
        # Whoever has nothing to say now wakes the event loop when it has.
        now = self._loop.time()
        if later := [source.due for source in self._live if source.due > now]:
            self._expect(min(later))

    def _expect(self, due: float) -> None:
        if self._timer is not None and self._timer.when() <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)

    def _send(self, source: FrameSource, now: float) -> None:
        source.waits = False  # before it looks: what comes from now on wakes it again
        self._early.discard(source)
        self._live.add(source)
        later = now + max(INTERVAL, len(self._live) / FRAMES)
        source.due = TICK * -(-later // TICK)
        self._expect(source.due)
        goes_on = False
        try:
            goes_on = source.send()
        except Exception as error:  # noqa: BLE001 (whatever it is, the others are served)
            source.fail(error)
        if not goes_on:
            self._live.discard(source)
