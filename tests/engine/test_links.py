"""How GPUs are linked, from what nvidia-smi prints, and what dividing a model may give."""

import subprocess
from typing import Any

import pytest
import torch

from engine.machine import links
from engine.machine.expected import PROGRAMS, Here, expected_speed
from engine.machine.links import find_links, parse_links, split
from engine.machine.shapes import known_shape

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-31\t0
GPU2\tSYS\tSYS\t X \tPHB\t32-63\t1
NIC0\tPXB\tNODE\tPHB\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
FUSED = PROGRAMS["fused kernels, CUDA graph"]
HERE = Here(torch.device("cuda"), torch.bfloat16, FUSED, False, 4.8e12, 140 * 10**9)


@pytest.mark.parametrize(("count", "kinds"), [(2, ("NV18",)), (3, ("NV18", "SYS"))])
def test_the_kinds_between_the_gpus_that_torch_sees(count: int, kinds: tuple[str, ...]) -> None:
    assert parse_links(TOPOLOGY, count) == kinds


@pytest.mark.parametrize(
    "text", ["", "No devices were found", "GPU0", "GPU0 X \x1b[31m;\x07evil", "GPUx X X"]
)
def test_anything_else_says_nothing(text: str) -> None:
    assert parse_links(text, 2) == ()


def test_a_machine_without_nvidia_smi_has_links_of_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", none)
    monkeypatch.setattr(links.torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 2})
    for count, expected in ((1, None), (2, (2, (), True)), (3, (3, (), False))):
        monkeypatch.setattr(links.torch.cuda, "device_count", lambda count=count: count)
        found = find_links()
        assert (None if found is None else (found.count, found.kinds, found.direct)) == expected


def gain(name: str) -> float:
    spec = known_shape(name)
    found = split(expected_speed(name, spec, HERE), spec, HERE, 2)
    assert found is not None
    return found.divided / found.alone


def test_what_is_large_gains() -> None:
    gains = [gain(name) for name in ("qwen3:0.6b", "qwen3:30b-a3b", "qwen3:8b")]
    assert gains == sorted(gains)
    assert gains[-1] < 2


def test_what_plain_modules_compute_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "not_divided", lambda spec: "it is not supported")
    assert gain("qwen3:8b") < 1
