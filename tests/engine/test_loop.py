"""What the engine's thread does, and in which order."""

from threading import Event

import pytest

from engine.errors import EngineError
from engine.schedule.loop import Loop
from tests.counting import PATIENCE, until


def test_what_can_wait_is_done_a_little_at_a_time_and_jobs_go_first() -> None:
    loop, seen, halfway, go_on = Loop(), list[str](), Event(), Event()

    def idle() -> bool:
        seen.append("idle")
        if seen.count("idle") == 2:
            halfway.set()
            go_on.wait()
        return seen.count("idle") < 4

    def start() -> None:
        loop.work(lambda: False, lambda: None, lambda _: seen.append("end"), idle)

    loop.call(start)
    halfway.wait()
    for name in ("first", "second"):
        loop.post(lambda name=name: seen.append(name))  # type: ignore[misc]
    go_on.set()
    while seen.count("idle") < 4:  # there is nothing to wait for: it is done when nobody asks for anything
        loop.call(lambda: None)
    loop.close()
    assert seen[:4] == ["idle", "idle", "first", "second"]
    assert seen[-1] == "end"


def test_steps_go_before_what_can_wait() -> None:
    loop, seen = Loop(), list[str]()

    def start() -> None:
        loop.work(
            lambda: len(seen) < 3,
            lambda: seen.append("step"),
            lambda _: None,
            lambda: bool(seen.append("idle")),
        )

    loop.call(start)
    loop.call(lambda: None)
    loop.close()
    assert seen[:3] == ["step"] * 3
    assert set(seen[3:]) <= {"idle"}


def test_what_makes_it_fail_is_told_to_who_waits_and_who_asks_later() -> None:
    loop, ended = Loop(), list[EngineError | None]()
    loop.call(lambda: loop.work(lambda: False, lambda: None, ended.append))
    loop.fail(EngineError("It is gone."))
    until(lambda: ended)
    loop.close()
    loop.fail(EngineError("It has ended."))
    assert [str(error) for error in ended] == ["It is gone."]
    with pytest.raises(EngineError, match="It is gone"):
        loop.post(lambda: None)


def test_how_long_it_is_at_the_same_thing() -> None:
    loop, may_end, began = Loop(), Event(), Event()

    def wait() -> None:
        began.set()
        may_end.wait(PATIENCE)

    until(lambda: loop.busy_s == 0)
    loop.post(wait)
    assert began.wait(PATIENCE)
    before = loop.busy_s
    until(lambda: loop.busy_s > before + 0.01)
    may_end.set()
    until(lambda: loop.busy_s == 0)
    loop.close()
