"""Frames of a stream: the first at once, what comes soon after it together, the end at once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.server.process import frame_batcher
from chatterm.server.process.frame_batcher import Pump


@dataclass(eq=False)
class Told:
    """Notes how much there was each time."""

    waits: bool = False
    due: float = 0.0
    said: int = 0
    sent: list[int] = field(default_factory=list)
    is_over: bool = False
    problem: Exception | None = None

    def send(self) -> bool:
        if self.problem is not None:
            raise self.problem
        self.sent.append(self.said)
        self.said = 0
        return not self.is_over

    def fail(self, error: Exception) -> None:
        assert error is self.problem


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between two frames does not pass."""
    monkeypatch.setattr(frame_batcher, "INTERVAL", 3600.0)


async def say(made: Pump, source: Told, at_once: bool = False) -> None:
    source.said += 1
    made.wake(source, at_once)
    await asyncio.sleep(0.001)


async def test_the_first_and_the_end_are_sent_at_once_and_the_rest_together(never: None) -> None:
    made, one, other = Pump(asyncio.get_running_loop()), Told(), Told()
    for _ in range(4):
        await say(made, one)
        await say(made, other)
    assert (one.sent, other.sent) == ([1], [1])
    await say(made, one, at_once=True)
    assert (one.sent, other.sent) == ([1, 4], [1])
    await say(made, other, at_once=True)
    assert other.sent == [1, 4]


async def test_an_end_that_nothing_came_before_is_sent_at_once(never: None) -> None:
    made, one = Pump(asyncio.get_running_loop()), Told()
    await say(made, one)
    await say(made, one, at_once=True)
    assert one.sent == [1, 1]


async def test_what_waits_is_sent_when_its_time_has_come() -> None:
    made, one = Pump(asyncio.get_running_loop()), Told()
    for _ in range(3):
        await say(made, one)
    while sum(one.sent) < 3:
        await asyncio.sleep(0.001)
    assert one.sent[0] == 1


class Clock:
    """An event loop that does at once what it is asked to do soon, and knows how often it was woken."""

    def __init__(self) -> None:
        self.now = 100.0
        self.woken = 0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, work: Callable[[], None]) -> None:
        self.woken += 1
        work()

    def call_at(self, when: float, work: Callable[[], None]) -> "Timer":
        self.timers.append(Timer(when, work))
        return self.timers[-1]

    def pass_to(self, now: float) -> None:
        """Let time pass."""
        while due := [timer for timer in self.timers if timer.at <= now]:
            first = min(due, key=Timer.when)
            self.timers.remove(first)
            if not first.is_cancelled:
                self.now = max(self.now, first.at)
                first.work()
        self.now = now


@dataclass
class Timer:
    """As asyncio's."""

    at: float
    work: Callable[[], None]
    is_cancelled: bool = False

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        self.is_cancelled = True


def pauses(made: Pump, clock: Clock, sources: list[Told]) -> list[float]:
    """Seconds after which these, which have something to say now, may send again."""
    clock.pass_to(clock.now + 10.0)
    for source in sources:
        made.wake(source)
    return [source.due - clock.now for source in sources]


def about(seconds: float) -> Any:
    """So many, up to the next tick."""
    return pytest.approx(seconds + frame_batcher.TICK / 2, abs=frame_batcher.TICK / 2 + 1e-6)


def test_the_more_streams_there_are_the_longer_each_gathers() -> None:
    clock = Clock()
    made = Pump(cast(asyncio.AbstractEventLoop, clock))
    many = [Told(said=1) for _ in range(600)]
    first = pauses(made, clock, many)
    assert all(source.sent == [1] for source in many)
    assert (first[0], first[-1]) == (about(frame_batcher.INTERVAL), about(600 / frame_batcher.FRAMES))
    # Those count that are not over, also where they have sent nothing lately.
    assert pauses(made, clock, many[:1]) == [about(600 / frame_batcher.FRAMES)]


@pytest.mark.parametrize("how", ["said", "failed", "left"])
def test_streams_that_are_over_do_not_count(how: str) -> None:
    clock = Clock()
    made = Pump(cast(asyncio.AbstractEventLoop, clock))
    many = [Told() for _ in range(600)]
    pauses(made, clock, many)
    for source in many[1:]:
        source.is_over, source.problem = how == "said", ValueError() if how == "failed" else None
        if how == "left":
            made.left(source)
        else:
            made.wake(source, at_once=True)
    assert pauses(made, clock, many[:1]) == [about(frame_batcher.INTERVAL)]


def test_what_comes_too_soon_wakes_nobody() -> None:
    clock = Clock()
    made, one = Pump(cast(asyncio.AbstractEventLoop, clock)), Told()
    for _ in range(10):
        one.said += 1
        made.wake(one)
    assert (clock.woken, one.sent) == (1, [1])
    clock.pass_to(one.due)
    assert (clock.woken, one.sent) == (1, [1, 9])
    clock.pass_to(one.due)
    one.said += 1
    made.wake(one)
    assert (clock.woken, one.sent) == (2, [1, 9, 1])


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.03), st.booleans()), max_size=60))
def test_whatever_comes_when_all_of_it_is_sent_in_time(said: list[tuple[int, float, bool]]) -> None:
    clock = Clock()
    made, streams = Pump(cast(asyncio.AbstractEventLoop, clock)), [Told() for _ in range(4)]
    for number, pause, ends in said:
        clock.pass_to(clock.now + pause)
        source = streams[number]
        if source.is_over:
            continue
        source.said += 1
        source.is_over = ends
        made.wake(source, at_once=ends)
        assert not (ends and source.said)
    clock.pass_to(clock.now + frame_batcher.INTERVAL + frame_batcher.TICK)
    assert not any(source.said for source in streams)
    clock.pass_to(clock.now + 1.0)
    assert not [timer for timer in clock.timers if not timer.is_cancelled]
