"""Loading to a GPU: the values of a CPU load, pinned and device memory given back, predicted size of activations."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import models.weights.staging
from engine.execute.profile_run import activation_bytes
from models.families.registry import load_spec
from models.loading.load import fill_network, load_model
from models.loading.plan import Target, plan_tensors
from models.progress import Progress
from models.reference.decoder import Decoder
from models.weights.checkpoint import read_safetensors
from models.weights.staging import Staging, pin
from tests.models.checkpoints import (
    files_of,
    random_model,
    tensors_in,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture
def given_back() -> Iterator[None]:
    """Check that a test leaves no device memory behind."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def same_as_on_the_cpu(path: Path, dtype: torch.dtype) -> bool:
    near = dict(tensors_in(load_model(files_of(path), dtype=dtype, device=CPU, quantize="none")))
    far = dict(tensors_in(load_model(files_of(path), dtype=dtype, device=GPU)))
    return near.keys() == far.keys() and all(torch.equal(far[name].cpu(), near[name]) for name in near)


@pytest.mark.usefixtures("given_back")
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, BF16])
def test_every_pair_of_dtypes(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_qwen3(attention_bias=True), dtype=stored, max_shard_size="60KB")
    assert same_as_on_the_cpu(folder, wanted)


@pytest.mark.usefixtures("given_back")
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_gguf_is_decoded_on_the_device_to_the_same_bits(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(tiny_llama(attention_bias=True)), kind)
    assert same_as_on_the_cpu(path, BF16)


def test_small_pieces_of_large_tensors_do_not_overtake_each_other(tmp_path: Path) -> None:
    config = tiny_llama(hidden_size=768, intermediate_size=2048, vocab_size=4000)
    folder = write_checkpoint(tmp_path, config, dtype=BF16)
    staging = Staging(
        piece_bytes=1 << 14, pieces=2, readers=2
    )  # every buffer is used again some hundred times
    spec = load_spec(files_of(folder))
    far = fill_network(
        plan_tensors(spec, read_safetensors(folder), Target(BF16, GPU, context_length=256)), staging=staging
    )
    near = dict(tensors_in(load_model(files_of(folder), dtype=BF16, device=CPU)))
    assert all(torch.equal(tensor.cpu(), near[name]) for name, tensor in tensors_in(far))


@pytest.mark.parametrize("cancelled", [False, True])
def test_pinned_memory_is_unpinned(cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, tiny_llama(), dtype=BF16)
    buffers: list[torch.Tensor] = []

    def noted(memory: torch.Tensor) -> bool:
        buffers.append(memory)
        return pin(memory)

    monkeypatch.setattr(models.weights.staging, "pin", noted)
    seen: list[bool] = []

    def watch(report: Progress) -> None:
        seen.extend(buffer.is_pinned() for buffer in buffers)
        if cancelled and report.done:
            raise KeyboardInterrupt

    if cancelled:
        with pytest.raises(KeyboardInterrupt):
            load_model(files_of(folder), dtype=BF16, device=GPU, on_progress=watch)
    else:
        load_model(files_of(folder), dtype=BF16, device=GPU, on_progress=watch)
    assert seen
    assert all(seen)
    assert [buffer.is_pinned() for buffer in buffers] == [False]


@pytest.mark.usefixtures("given_back")
def test_a_cancelled_load_gives_the_device_memory_back_at_once(tmp_path: Path) -> None:
    config = tiny_llama(hidden_size=768, intermediate_size=2048, vocab_size=4000)
    folder = write_checkpoint(tmp_path, config, dtype=BF16)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def cancel(report: Progress) -> None:
        if report.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        load_model(files_of(folder), dtype=BF16, device=GPU, on_progress=cancel)
    assert caught.value.__traceback__ is not None  # it is still held, and yet:
    assert torch.cuda.memory_reserved() <= before + (2 << 20)


def test_memory_that_cannot_be_pinned_is_used_unpinned() -> None:
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    assert pin(memory)
    try:
        assert not pin(memory)  # pinning it again is a CUDA error
        assert torch.ones(3, device=GPU).sum().item() == 3  # which no later call reports
    finally:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def test_what_a_chunk_takes_is_measured_and_judged_by_fewer_rows_where_it_does_not_fit(
    tmp_path: Path,
) -> None:
    config = tiny_qwen3(
        hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4, head_dim=128
    )
    folder = write_checkpoint(tmp_path, config, dtype=BF16)
    model = Decoder(load_model(files_of(folder), dtype=BF16, device=GPU))
    chunk = 16384
    taken = activation_bytes(model, chunk, 1, GPU)
    ids, positions = torch.zeros(chunk, dtype=torch.int64, device=GPU), torch.arange(chunk, device=GPU) % 256
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        model.logits(model.forward(ids, positions, lambda _, q, k, v: q.clone())[-1:])
    measured = torch.cuda.max_memory_allocated() - before
    assert 0.95 * measured <= taken <= 1.2 * measured
    del ids, positions
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + taken // 2) / total)
    try:
        little = activation_bytes(model, chunk, 1, GPU)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 0.8 * taken <= little <= 1.3 * taken
