"""The doctor on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.device import pick_device
from engine.machine.report import inspect_machine, measure_bandwidth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Mark:
    """A timing event of a GPU on which every copy takes a millisecond."""

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, end: "Mark") -> float:
        return 1.0


def test_the_copy_bandwidth_is_bytes_by_time_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    assert measure_bandwidth(device) > 0
    monkeypatch.setattr("torch.cuda.Event", Mark)
    copied = measure_bandwidth(device) / 2000
    assert 2**20 <= copied <= 2**30
    assert copied % 2**20 == 0
    assert torch.cuda.memory_reserved(device) == before


def test_everything_is_found_out() -> None:
    found = inspect_machine()
    assert found.failures == ()
    assert found.device == "cuda"
    assert found.gpu is not None
    assert found.gpu.name == torch.cuda.get_device_name()
    assert 0 < found.gpu.memory_free <= found.gpu.memory_total
    assert found.torch_cuda == torch.version.cuda
    assert found.driver_cuda is not None
    assert found.driver is not None
    assert [feature.reason for feature in found.attention if feature.name == "sdpa"] == [None]
    assert found.decode[-1].reason is None
    speeds = [speed.tokens_per_s for speed in found.speeds if speed.tokens_per_s is not None]
    assert speeds
    assert min(speeds) > 0
    assert speeds[0] == max(speeds)  # the catalogue begins with the smallest


def test_cuda_is_picked() -> None:
    assert pick_device("auto").device.type == "cuda"
    assert pick_device("cuda").device.type == "cuda"


def test_the_command_prints_it() -> None:
    command = [sys.executable, "-m", "chatterm", "doctor"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert torch.cuda.get_device_name() in done.stdout
    assert "GB/s copied within the GPU" in done.stdout
    assert done.stderr == ""
