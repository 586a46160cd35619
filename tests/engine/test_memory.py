"""How much KV cache there is."""

from pathlib import Path

import pytest
import torch

from engine.device import DTYPES, available_memory, pick_device, pick_dtype
from engine.errors import EngineError
from engine.memory import plan_kv

KIB = 1024


def test_the_model_s_own_context_where_it_fits_and_room_for_branches() -> None:
    plan = plan_kv(KIB, 32, available=1 << 30, model_limit=8192, requested=None)
    assert plan.context_length == 8192
    assert plan.num_blocks == 2 * 8192 // 32 + 1


def test_the_cache_never_takes_more_than_its_share() -> None:
    for megabytes in (1, 3, 7, 20):
        plan = plan_kv(KIB, 32, available=megabytes << 20, model_limit=8192, requested=None)
        assert plan.num_blocks * 32 * KIB <= megabytes << 19
        assert plan.context_length < plan.num_blocks * 32


def test_a_requested_context_is_kept_or_refused_with_what_would_fit() -> None:
    assert plan_kv(KIB, 32, available=1 << 30, model_limit=8192, requested=1000).context_length == 1000
    with pytest.raises(EngineError, match=r"8,000 tokens needs 8 MiB.*--context (\d+)") as caught:
        plan_kv(KIB, 32, available=4 << 20, model_limit=8192, requested=8000)
    fits = int(str(caught.value).split("--context ")[1].split()[0])
    assert plan_kv(KIB, 32, available=4 << 20, model_limit=8192, requested=fits).context_length == fits


@pytest.mark.parametrize(
    ("requested", "message"), [(9000, "made for 8,192"), (3, "16 tokens or more"), (-1, "16 tokens or more")]
)
def test_an_impossible_context_is_refused(requested: int, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        plan_kv(KIB, 32, available=1 << 30, model_limit=8192, requested=requested)


def test_no_memory_at_all_is_said() -> None:
    with pytest.raises(EngineError, match="Too little memory"):
        plan_kv(KIB, 32, available=1000, model_limit=8192, requested=None)


def test_devices_and_dtypes() -> None:
    cpu = pick_device("cpu").device
    assert available_memory(cpu) > 0
    assert pick_dtype("auto", cpu) is torch.bfloat16
    assert {pick_dtype(name, cpu) for name in DTYPES} == set(DTYPES.values())
    with pytest.raises(EngineError, match="no dtype 'int3'"):
        pick_dtype("int3", cpu)
    with pytest.raises(EngineError, match="no device 'tpu'"):
        pick_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_why() -> None:
    with pytest.raises(EngineError, match="--device cuda cannot be used"):
        pick_device("cuda")


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    from engine.device import _cgroup_memory

    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert _cgroup_memory(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_memory(tmp_path) is None
    assert _cgroup_memory(tmp_path / "absent") is None
