"""Batches the output of streams between engine threads and connections: at most one frame per stream every 10 ms.

At 256 streams, a frame per token would exceed both processes' CPU. So the more streams there are, the longer each one
batches: together they send a bounded number of frames per second.

    engine's thread | first token: wakes the event loop | more: queued      | more: queued | the end: wakes it
    event loop      | sends it                          | its slot: sends   | ...          | sends the rest

Waking the event loop costs the engine's thread a system call and the interpreter lock. So it is only woken when
something may be sent now; earlier output is queued, as a timer runs until the next slot.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol

INTERVAL = 0.010
"""Minimum seconds between two frames of a stream."""
FRAMES = 3000
"""Maximum frames per second of all streams together, without the first and the last of each."""
TICK = 0.005
"""Send slots are at multiples of this many seconds, so that many streams share one."""


class FrameSource(Protocol):
    """A stream with occasional output. `waits` and `due` belong to the pump."""

    waits: bool
    due: float

    def send(self) -> bool:
        """Send all queued output, on the event loop's thread; return whether more may follow."""

    def fail(self, error: Exception) -> None:
        """End the stream, because sending failed."""


class Pump:
    """Schedules when streams send: the first output at once, later output in batches."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fresh: deque[FrameSource] = deque()
        """Sources with output to send; appended to from any thread."""
        self._early: set[FrameSource] = set()
        """Sources that must wait for their next send slot."""
        self._called = False
        self._timer: asyncio.TimerHandle | None = None
        self._live: set[FrameSource] = set()
        """Sources that have sent something and have not ended."""

    def left(self, source: FrameSource) -> None:
        """Forget `source`, which has ended. On the event loop's thread."""
        self._live.discard(source)

    def wake(self, source: FrameSource, at_once: bool = False) -> None:
        """Schedule `source`, which has output; `at_once`: it has ended and waits for no slot. From any thread."""
        if at_once:
            source.due = 0.0
        elif source.waits:
            return
        source.waits = True
        self._fresh.append(source)
        # After the append: otherwise the timer could run in between and miss it.
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
            if not source.waits:  # it was queued twice, and has been served
                continue
            if source.due > now:
                self._early.add(source)
                self._expect(source.due)
            else:
                self._send(source, now)

    def _tick(self) -> None:
        """Send what waited for this slot, and set the timer for the next one."""
        self._timer = None
        early, self._early = self._early, set()
        self._fresh.extend(early)
        self._run()
        # Sources whose slot has passed wake the event loop themselves.
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
        source.waits = False  # before `send`: output that comes later wakes it again
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
