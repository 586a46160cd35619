"""How much KV cache there is."""

import pytest
import torch

from engine.cache.computing import expert_bytes
from engine.cache.kv_needs import KVNeeds
from engine.cache.sizing import GPU_SHARE, KVPlan, kv_refused, kv_share, plan_kv
from engine.device import DTYPES, available_memory, pick_device, pick_dtype
from engine.errors import EngineError
from engine.machine.shapes import known_shape
from models.loading.load import is_out_of_memory

KIB = 1024


def test_the_model_s_own_context_where_it_fits_and_room_for_branches() -> None:
    plan = plan_kv(KVNeeds(KIB), available=1 << 30, model_limit=8192, requested=None)
    assert plan.context_length == 8192
    assert plan.num_blocks == 2 * 8192 // 32 + 1


def test_the_cache_never_takes_more_than_its_share() -> None:
    for megabytes in (1, 3, 7, 20):
        plan = plan_kv(KVNeeds(KIB), available=megabytes << 20, model_limit=8192, requested=None)
        assert plan.num_blocks * 32 * KIB <= megabytes << 19
        assert plan.context_length < plan.num_blocks * 32


def test_a_requested_context_is_kept_or_refused_with_what_would_fit() -> None:
    assert plan_kv(KVNeeds(KIB), available=1 << 30, model_limit=8192, requested=1000).context_length == 1000
    with pytest.raises(EngineError, match=r"8,000 tokens needs 8.2 MB.*--context (\d+)") as caught:
        plan_kv(KVNeeds(KIB), available=4 << 20, model_limit=8192, requested=8000)
    fits = int(str(caught.value).split("--context ")[1].split()[0])
    assert plan_kv(KVNeeds(KIB), available=4 << 20, model_limit=8192, requested=fits).context_length == fits


@pytest.mark.parametrize(
    ("requested", "message"), [(9000, "made for 8,192"), (3, "16 tokens or more"), (-1, "16 tokens or more")]
)
def test_an_impossible_context_is_refused(requested: int, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        plan_kv(KVNeeds(KIB), available=1 << 30, model_limit=8192, requested=requested)


def test_no_memory_at_all_is_said() -> None:
    with pytest.raises(EngineError, match="Too little memory"):
        plan_kv(KVNeeds(KIB), available=1000, model_limit=8192, requested=None)


def test_a_chunk_has_memory_for_its_experts() -> None:
    assert expert_bytes(known_shape("qwen3:30b-a3b"), 4096, 2) == 4096 * 8 * (768 + 2048) * 2
    assert expert_bytes(known_shape("llama3.2:1b"), 4096, 2) == 0


@pytest.mark.parametrize("streams", [1, 3, 64])
def test_the_cache_has_a_context_for_each_stream_and_one_more_where_they_fit(streams: int) -> None:
    plan = plan_kv(KVNeeds(KIB), 1 << 30, 8192, requested=1024, streams=streams)
    assert (plan.context_length, plan.num_blocks) == (1024, (streams + 1) * 1024 // 32 + 1)
    little = plan_kv(KVNeeds(KIB), 8 << 20, 8192, requested=1024, streams=streams)
    assert (little.context_length, little.num_blocks) == (1024, min((streams + 1) * 32, 4095 // 32) + 1)


def test_devices_and_dtypes() -> None:
    cpu = pick_device("cpu").device
    assert available_memory(cpu) > 0
    assert pick_dtype("auto", cpu) is torch.bfloat16
    assert {pick_dtype(name, cpu) for name in DTYPES} == set(DTYPES.values())
    with pytest.raises(EngineError, match="Unknown dtype 'int3'"):
        pick_dtype("int3", cpu)
    with pytest.raises(EngineError, match="Unknown device 'tpu'"):
        pick_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_why() -> None:
    with pytest.raises(EngineError, match="--device cuda cannot be used"):
        pick_device("cuda")


def test_the_reserve_is_left_alone() -> None:
    plan = plan_kv(KVNeeds(KIB), 20 << 20, 8192, None, share=GPU_SHARE, reserve=15 << 20)
    taken = plan.num_blocks * 32 * KIB
    assert 0.8 * (5 << 20) < taken <= 0.9 * (5 << 20)


def test_a_gpu_takes_no_more_than_is_useful() -> None:
    plan = plan_kv(KVNeeds(KIB), 80 << 30, 8192, None, share=kv_share(torch.device("cuda")), reserve=1 << 30)
    assert (plan.context_length, plan.num_blocks) == (8192, 2 * 8192 // 32 + 1)
    assert kv_share(torch.device("cpu")) == 0.5


def test_a_reserve_that_leaves_too_little_is_told_with_what_would_fit() -> None:
    def plan(requested: int | None, reserve: int) -> int:
        return plan_kv(KVNeeds(KIB), 20 << 20, 8192, requested, share=0.9, reserve=reserve).context_length

    with pytest.raises(
        EngineError, match=r"needs 8.2 MB for its KV cache and 16 MB to compute with; 21 MB"
    ) as caught:
        plan(8000, 15 << 20)
    fits = int(str(caught.value).split("--context ")[1].split()[0])
    assert plan(fits, 15 << 20) == fits
    with pytest.raises(EngineError, match=r"0 B can be used for the cache\. Close other programs"):
        plan(None, 30 << 20)


def test_a_cache_that_could_not_be_allocated_is_told_with_what_would_fit() -> None:
    plan = KVPlan(8192, 513, KVNeeds(KIB))
    message = str(kv_refused(plan, available=10 << 20))
    assert "the KV cache of 17 MB could not be allocated, 10 MB are free now" in message
    fits = int(message.split("--context ")[1].split()[0])
    assert plan_kv(KVNeeds(KIB), 10 << 20, 8192, fits).context_length == fits
    assert "Close other programs" in str(kv_refused(plan, available=10 << 10))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_that_ran_out_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), EngineError("no")]
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
