"""Frames of a stream: the first at once, what comes soon after it together, the end at once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from chatterm.server.process import pump
from chatterm.server.process.pump import Pump


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
    monkeypatch.setattr(pump, "INTERVAL", 3600.0)


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
    """An event loop that does at once what it is asked to do soon."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, work: Callable[[], None]) -> None:
        work()

    def call_at(self, when: float, work: Callable[[], None]) -> None:
        """Nobody waits for it here."""


def pauses(made: Pump, clock: Clock, sources: list[Told]) -> list[float]:
    """Seconds after which these, which have something to say now, may send again."""
    clock.now += 10.0
    for source in sources:
        made.wake(source)
    return [source.due - clock.now for source in sources]


def test_the_more_streams_there_are_the_longer_each_gathers() -> None:
    clock = Clock()
    made = Pump(cast(asyncio.AbstractEventLoop, clock))
    many = [Told(said=1) for _ in range(600)]
    first = pauses(made, clock, many)
    assert all(source.sent == [1] for source in many)
    assert (first[0], first[-1]) == (pytest.approx(pump.INTERVAL), pytest.approx(600 / pump.FRAMES))
    # Those count that are not over, also where they have sent nothing lately.
    assert pauses(made, clock, many[:1]) == [pytest.approx(600 / pump.FRAMES)]


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
    assert pauses(made, clock, many[:1]) == [pytest.approx(pump.INTERVAL)]
