"""Weights streamed through staging buffers: the same values as a plain copy, whatever the sizes; failures; memory."""

import gc
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import models.loading.load
import models.weights.staging
from models.errors import ModelError
from models.families.family import GGUF_NAMES, NAMES
from models.families.registry import load_spec
from models.loading.load import _Filling, fill_network, load_model
from models.loading.plan import Target, plan_tensors, read_tensors
from models.progress import Progress
from models.weights import block_formats
from models.weights.checkpoint import StoredTensor, read_safetensors
from models.weights.formats.blocks import decoder
from models.weights.staging import Extent, Staging
from tests.models.checkpoints import (
    files_of,
    random_model,
    tensors_in,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)

CPU = torch.device("cpu")
SMALL = Staging(piece_bytes=1000, pieces=3, readers=2)
"""Cuts every matrix of the tiny models, even within a row."""


def streamed(
    path: Path,
    dtype: torch.dtype = torch.float32,
    staging: Staging = SMALL,
    tensors: list[StoredTensor] | None = None,
    on_progress: Any = None,
) -> Any:
    names = GGUF_NAMES if path.suffix == ".gguf" else NAMES
    given = tensors or read_tensors(files_of(path))[1]
    target = Target(dtype, CPU, context_length=256)
    return fill_network(plan_tensors(load_spec(files_of(path)), given, target, names), on_progress, staging)


def same_weights(one: Any, other: Any) -> bool:
    theirs, ours = dict(tensors_in(other)), dict(tensors_in(one))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_qwen3(attention_bias=True, tie_word_embeddings=False)
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), config, max_shard_size="60KB")


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_every_pair_of_dtypes(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_qwen3(attention_bias=True), dtype=stored)
    plain = load_model(files_of(folder), dtype=wanted, device=CPU)
    model = streamed(folder, wanted)
    assert same_weights(model, plain)
    assert model.head.parts == (model.embedding,)


@pytest.mark.parametrize(
    "staging",
    [
        Staging(piece_bytes=8, pieces=4, readers=2),
        Staging(piece_bytes=1001, pieces=2, readers=1),
        Staging(piece_bytes=4096, pieces=1, readers=3),
        Staging(piece_bytes=1 << 20, pieces=3, readers=4),
    ],
)
def test_pieces_of_any_size_and_number(staging: Staging, folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert same_weights(
        streamed(folder, staging=staging), load_model(files_of(folder), dtype=torch.float32, device=CPU)
    )


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
def test_gguf_is_decoded_from_pieces(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(tiny_llama(attention_bias=True)), kind)
    plain = load_model(files_of(path), dtype=torch.bfloat16, device=CPU, quantize="none")
    assert same_weights(streamed(path, torch.bfloat16), plain)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_decoded_from_pieces(kind: Kind, tmp_path: Path) -> None:
    data = torch.randint(256, (40, gguf.GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8)
    data[:, [0, 1, 2, 3, -2, -1]] = torch.tensor([7, 12, 9, 11, 3, 10], dtype=torch.uint8)  # finite scales
    path = tmp_path / "blocks"
    path.write_bytes(b"head" + data.numpy().tobytes())
    decode = decoder(block_formats.Kind(kind))
    assert decode is not None
    out = torch.empty(10, 1024)
    extent = Extent(path, 4, data.nbytes, out.numel(), data.shape[1], decode)
    Staging(piece_bytes=3000, pieces=2, readers=2).stream([(extent, out)], CPU, lambda _: None)
    expected = torch.from_numpy(gguf.dequantize(data.numpy(), kind))
    assert torch.equal(out.flatten(), expected.flatten())


def test_a_type_that_only_the_gguf_package_reads_is_copied(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(tiny_llama(hidden_size=96)), Kind.F32)
    _, stored, *_ = read_tensors(files_of(path))
    tensors = [StoredTensor(t.name, t.shape, t.nbytes, t.copy_into) for t in stored]
    plain = load_model(files_of(path), dtype=torch.float32, device=CPU)
    assert same_weights(streamed(path, tensors=tensors), plain)


def test_progress_counts_the_pieces_and_ends_full(folder: Path) -> None:
    reports: list[Progress] = []
    streamed(folder, on_progress=reports.append)
    done = [report.done for report in reports]
    assert done[0] == 0
    assert done == sorted(set(done))
    assert done[-1] == reports[-1].total == sum(tensor.nbytes for tensor in read_safetensors(folder))
    assert max(after - before for before, after in pairwise(done)) <= SMALL.piece_bytes


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_file_that_shrinks_after_its_header_was_read(left: float, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_llama())
    tensors, path = read_safetensors(folder), folder / "model.safetensors"
    data = path.read_bytes()
    path.unlink()  # the old file stays mapped: only new reads see the shorter one
    path.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(ModelError, match=r"model\.safetensors ended too early.*download it again") as caught:
        streamed(folder, tensors=tensors)
    assert "\n" not in str(caught.value)
    assert not reading_threads()


def test_a_file_that_vanishes_after_its_header_was_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_llama())
    tensors = read_safetensors(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        streamed(folder, tensors=tensors)


class CancelledError(Exception):
    pass


def test_a_cancelled_load_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[Any] = []
    slots = models.weights.staging.StagingBuffer
    monkeypatch.setattr(
        models.weights.staging,
        "StagingBuffer",
        lambda memory: (buffers.append(weakref.ref(memory)), slots(memory))[1],
    )
    weights: list[Any] = []
    allocate = _Filling.allocate

    def watched(filling: _Filling, *arguments: Any) -> None:
        allocate(filling, *arguments)
        weights.extend(weakref.ref(tensor) for tensor in filling.store.plain.values())

    monkeypatch.setattr(_Filling, "allocate", watched)

    def cancel(report: Progress) -> None:
        assert report.total is not None
        if report.done > report.total // 2:
            raise CancelledError

    with pytest.raises(CancelledError) as caught:
        streamed(folder, on_progress=cancel)
    gc.collect()
    assert len(buffers) == SMALL.pieces
    assert weights
    # Even while the error is still held, as it is while a user reads it.
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in weights + buffers if ref() is not None] == []
    assert not reading_threads()


def test_a_load_that_failed_can_be_tried_again(folder: Path) -> None:
    tensors = read_safetensors(folder)

    def fail(report: Progress) -> None:
        if report.done:
            raise CancelledError

    with pytest.raises(CancelledError):
        streamed(folder, tensors=tensors, on_progress=fail)
    plain = load_model(files_of(folder), dtype=torch.float32, device=CPU)
    assert same_weights(streamed(folder, tensors=tensors), plain)


def test_a_model_too_large_for_a_gpu_is_told_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda": 100_000, "cpu": 10_000_000_000}
    monkeypatch.setattr(models.loading.load, "available_bytes", lambda device: free[device.type])
    spec, tensors = load_spec(files_of(folder)), read_safetensors(folder)

    target = Target(torch.float32, torch.device("cuda"), context_length=256)

    def refusal() -> str:
        with pytest.raises(ModelError) as caught:
            fill_network(plan_tensors(spec, tensors, target))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    message = refusal()
    assert "of memory on cuda, but 100 kB are free" in message
    assert "--dtype bfloat16" in message
    assert "use --device cpu, where 10 GB are free" in message
    free["cpu"] = 50_000
    free["cuda"] = 120_000
    assert "--device cpu" not in refusal()
