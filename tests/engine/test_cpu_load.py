"""Other programs keep a CPU busy, and our own work does not count."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.execute.runner import Runner
from engine.schedule import cpu_load
from engine.schedule.cpu_load import OtherPrograms, Used


class Machine:
    """Two cores whose programs run as the test says."""

    def __init__(self) -> None:
        self.at = self.everybody = self.own = 0.0
        self.looks = 0
        self.told = True

    def used(self) -> Used:
        self.looks += 1
        return Used(self.at, self.everybody if self.told else None, self.own)

    def others(self) -> OtherPrograms:
        return OtherPrograms(2, self.used, lambda: self.at)

    def run(self, seconds: float, own: float, others: float) -> None:
        """So many cores each for a while."""
        self.at += seconds
        self.own += own * seconds
        self.everybody += (own + others) * seconds


def test_only_what_others_take_counts() -> None:
    machine = Machine()
    others = machine.others()
    assert not others.are_busy(), "nothing is known yet"
    machine.run(1.0, own=2.0, others=0.1)
    assert not others.are_busy(), "a long answer of ours keeps all cores busy"
    machine.run(1.0, own=1.3, others=0.7)
    assert others.are_busy()
    machine.run(1.0, own=1.0, others=1.0)
    assert others.are_busy()
    machine.run(1.0, own=1.0, others=0.1)
    assert not others.are_busy()


def test_the_cores_that_others_leave_are_free() -> None:
    machine = Machine()
    others = machine.others()
    found = []
    for taken in (0.0, 0.2, 0.7, 1.0, 2.0, 0.1):
        machine.run(1.0, own=2.0 - taken, others=taken)
        others.are_busy()
        found.append(others.free)
    assert found == [2, 2, 1, 1, 0, 2]


@pytest.mark.parametrize(
    ("alone", "free", "working"), [(False, 8, 7), (False, 6, 6), (False, 1, 4), (True, 8, 1)]
)
def test_a_person_has_half_of_the_threads_at_least(alone: bool, free: int, working: int) -> None:
    pool: Any = SimpleNamespace(threads=7, working=2)
    pool.set_working = partial(setattr, pool, "working")
    runner: Any = SimpleNamespace(pool=pool)
    Runner.leave_cores(runner, alone, free)
    assert pool.working == working


def test_the_system_is_asked_once_a_second_at_most() -> None:
    machine = Machine()
    others = machine.others()
    for _ in range(101):
        others.are_busy()
        machine.run(0.05, own=1.0, others=2.0)
    assert others.busy
    assert 4 <= machine.looks <= 6


def test_where_the_system_does_not_tell_the_load_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.told = False
    others = machine.others()
    for load, busy_now in ((1.9, False), (2.1, True), (0.5, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert others.are_busy() is busy_now
        machine.run(1.0, own=0.0, others=0.0)
    monkeypatch.delattr(os, "getloadavg")
    assert not others.are_busy()


@pytest.mark.skipif(sys.platform == "win32", reason="clock ticks are POSIX")
def test_what_linux_tells(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text(
        f"cpu  {ticks} {ticks} {ticks} {9 * ticks} {9 * ticks} {ticks} {ticks} {ticks} 5 5\ncpu0 1\n"
    )
    assert cpu_load._everybody(stat) == 6.0
    for text in ("cpu  0 0 0 0 0 0 0 0 0 0\n", "nonsense here\n", ""):
        stat.write_text(text)
        assert cpu_load._everybody(stat) is None
    assert cpu_load._everybody(tmp_path / "none") is None


def test_our_own_time_is_counted() -> None:
    before = cpu_load.used()
    ends = time.process_time() + 0.1
    while time.process_time() < ends:
        pass
    after = cpu_load.used()
    assert after.own - before.own >= 0.05
    assert after.at > before.at
    if after.everybody is not None and before.everybody is not None:
        assert after.everybody >= before.everybody
