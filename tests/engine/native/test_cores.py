"""How many threads a machine gets, over files like those of the system, and over a Mac's sysctl."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.kernels.native import library as native
from engine.kernels.native.library import (
    core_speeds,
    default_threads,
    fast_cores,
    physical_cores,
    processor_quotas,
)


def processors(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, speeds: Sequence[int | None]
) -> None:
    """Make a machine of cores with two processors each, whose file `name` has the speeds."""
    for core, speed in enumerate(speeds):
        for processor in (2 * core, 2 * core + 1):
            (folder / f"cpu{processor}/topology").mkdir(parents=True)
            (folder / f"cpu{processor}/cpufreq").mkdir()
            siblings = folder / f"cpu{processor}/topology/thread_siblings_list"
            siblings.write_text(f"{2 * core}-{2 * core + 1}\n")
            if speed is not None:
                (folder / f"cpu{processor}" / name).write_text(f"{speed}\n")
    everything = set(range(2 * len(speeds)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: everything, raising=False)
    monkeypatch.setattr(native, "core_speeds", lambda: core_speeds(folder))
    monkeypatch.setattr(native, "processor_quotas", list)


@pytest.mark.parametrize(
    ("name", "speeds", "fast", "threads"),
    [
        ("cpu_capacity", [1024] * 4 + [280] * 4, 4, 4),  # the screen has the slow ones
        ("cpu_capacity", [414] * 4 + [880] * 3 + [1024], 4, 4),
        ("cpufreq/cpuinfo_max_freq", [5200000] * 6 + [5400000] * 2 + [3900000] * 8, None, 15),
        ("cpufreq/cpuinfo_max_freq", [4800000] * 6 + [3800000] * 8 + [2100000] * 2, 14, 14),
        ("cpu_capacity", [1024] * 4, None, 3),
        ("cpu_capacity", [1024, 1024, 200], 2, 2),
        ("cpu_capacity", [1024, None, 200, 200], None, 3),  # half of an answer is none
    ],
)
def test_slow_cores_get_no_thread_by_default(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    speeds: Sequence[int | None],
    fast: int | None,
    threads: int,
) -> None:
    processors(monkeypatch, tmp_path, name, speeds)
    assert physical_cores() == len(speeds)
    assert fast_cores() == fast
    assert default_threads() == threads


def test_a_quota_counts_before_slow_cores_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processors(monkeypatch, tmp_path, "cpu_capacity", [1024] * 4 + [280] * 4)
    monkeypatch.setattr(native, "processor_quotas", lambda: [6, 3])
    assert physical_cores() == 3
    assert default_threads() == 2


@pytest.mark.parametrize(
    ("told", "cores", "fast", "threads"),
    [
        ({"hw.physicalcpu": 8, "hw.perflevel0.physicalcpu": 4}, 8, 4, 4),
        ({"hw.physicalcpu": 12, "hw.perflevel0.physicalcpu": 10}, 12, 10, 10),
        ({"hw.physicalcpu": 6}, 6, None, 5),  # an Intel Mac, with twelve processors
        ({}, 12, None, 11),
    ],
)
def test_a_mac_counts_its_performance_cores(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    told: dict[str, int],
    cores: int,
    fast: int | None,
    threads: int,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    answers = "".join(f'[ "$2" = {name} ] && echo {number} && exit\n' for name, number in told.items())
    program = tmp_path / "sysctl"
    program.write_text(f"#!/bin/sh\n{answers}echo \"sysctl: unknown oid '$2'\" >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert physical_cores() == cores
    assert fast_cores() == fast
    assert default_threads() == threads
    program.unlink()
    assert physical_cores() == 12


def system(folder: Path, own: str, mount: str) -> Path:
    """Make /proc of a process whose cgroups are mounted at `folder`; return it."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(f"{own}\n")
    (folder / "proc/self/mountinfo").write_text(f"31 22 0:26 / {folder} rw - {mount}\n")
    return folder / "proc"


def test_the_quota_of_every_group_around_the_process_counts(tmp_path: Path) -> None:
    proc = system(tmp_path, "0::/user.slice/chat.scope", "cgroup2 cgroup2 rw")
    (tmp_path / "user.slice/chat.scope").mkdir(parents=True)
    assert processor_quotas(proc) == []
    (tmp_path / "user.slice/chat.scope/cpu.max").write_text("max 100000\n")
    (tmp_path / "user.slice/cpu.max").write_text("250000 100000\n")
    assert processor_quotas(proc) == [3]


def test_the_quota_of_cgroup_v1_counts(tmp_path: Path) -> None:
    proc = system(tmp_path, "4:cpu,cpuacct:/docker/abc", "cgroup cgroup rw,cpu,cpuacct")
    for path, quota in (("docker/abc", -1), ("docker", 400_000)):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / path / "cpu.cfs_period_us").write_text("100000\n")
    assert processor_quotas(proc) == [4]
