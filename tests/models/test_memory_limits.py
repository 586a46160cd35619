"""The memory that a container or a systemd slice leaves to this process, over files like those of the system."""

from pathlib import Path

import pytest
import torch

from models.weights import memory
from models.weights.memory import available_bytes, group_limits

UNLIMITED_V1 = 9223372036854771712


class System:
    """/proc and /sys/fs/cgroup in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.say("self/mountinfo", "22 1 0:20 / /proc rw - proc proc rw")

    def say(self, name: str, *lines: str) -> None:
        (self.proc / name).write_text("".join(f"{line}\n" for line in lines))

    def mount(self, at: str, kind: str, options: str = "rw", root: str = "/") -> None:
        with (self.proc / "self/mountinfo").open("a") as file:
            file.write(
                f"31 22 0:26 {root} {self.groups / at} rw,relatime shared:9 - {kind} {kind} {options}\n"
            )

    def group(self, path: str, **files: str) -> None:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(text + "\n")

    def left(self) -> list[int]:
        return [limit - used for limit, used in group_limits(self.proc)]


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


STAT = "anon 500\ninactive_file 70\nactive_file 30"


def test_a_container_s_limit_counts_without_its_cached_files(system: System) -> None:
    system.say("self/cgroup", "0::/")
    system.mount("", "cgroup2")
    system.group("", max="1000", current="600", stat=STAT)
    assert system.left() == [500]
    system.group("", max="max")
    assert system.left() == []


def test_every_group_around_the_process_counts(system: System) -> None:
    system.say("self/cgroup", "0::/user.slice/app.slice/chat.scope")
    system.mount("", "cgroup2")
    system.group("user.slice/app.slice/chat.scope", max="max", high="max", current="100", stat="")
    system.group("user.slice/app.slice", max="3000", high="2000", current="600", stat=STAT)
    system.group("user.slice", max="5000", high="max", current="4800", stat=STAT)
    system.group("other.slice", max="1", current="0", stat="")
    assert system.left() == [1500, 300]  # memory.high throttles before memory.max refuses


def test_cgroup_v1_counts_with_the_files_of_the_groups_within(system: System) -> None:
    system.say("self/cgroup", "9:name=systemd:/docker/abc", "4:cpu,memory:/docker/abc", "0::/docker/abc")
    system.mount("cpu", "cgroup", "rw,cpu")
    system.mount("memory", "cgroup", "rw,cpu,memory")
    system.mount("unified", "cgroup2")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 70\ntotal_active_file 30"
    system.group("memory/docker/abc", limit_in_bytes="1000", usage_in_bytes="600", stat=stat)
    system.group("memory/docker", limit_in_bytes="900", usage_in_bytes="700", stat=stat)
    system.group("memory", limit_in_bytes=str(UNLIMITED_V1), usage_in_bytes="0", stat="")
    system.group("cpu/docker/abc", limit_in_bytes="1", usage_in_bytes="0", stat="")
    system.group("unified/docker/abc")
    assert system.left()[:2] == [500, 300]
    assert min(system.left()) == 300


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/docker/abc", "/docker/abc"),
        ("/docker/abc/inner", "/docker/abc"),
        ("/docker/abc", "/elsewhere"),
        ("/../x", "/"),
    ],
)
def test_a_container_finds_its_group_where_it_is_mounted(system: System, path: str, root: str) -> None:
    """Without a namespace of its own, it sees the path on the host."""
    system.say("self/cgroup", f"4:memory:{path}")
    system.mount("memory", "cgroup", "rw,memory", root)
    system.group("memory", limit_in_bytes="1000", usage_in_bytes="600", stat="")
    assert system.left() == [400]


@pytest.mark.parametrize("lines", [[], ["nonsense"], ["0::/gone/away"]])
def test_a_system_that_does_not_tell_limits_nothing(system: System, lines: list[str]) -> None:
    system.say("self/cgroup", *lines)
    system.mount("", "cgroup2")
    assert system.left() == []
    system.group("", max="1000", current="many", stat="x")
    assert system.left() == []


def test_the_least_of_all_limits_is_free(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROC", system.proc)
    monkeypatch.setattr(memory, "group_limits", lambda: group_limits(system.proc))
    system.say("meminfo", "MemTotal: 9 kB", "MemAvailable: 2 kB")
    system.say("self/cgroup", "0::/slice")
    system.mount("", "cgroup2")
    cpu = torch.device("cpu")
    assert available_bytes(cpu) == 2048
    system.group("slice", max="1000", current="600", stat=STAT)
    assert available_bytes(cpu) == 500
    system.group("slice", current="1700")
    assert available_bytes(cpu) == 0
    (system.proc / "meminfo").unlink()
    (system.proc / "self/cgroup").unlink()
    assert available_bytes(cpu) is None
