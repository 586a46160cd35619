"""Loading safetensors checkpoints: shards, memory, progress, and damaged files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models.loading.load
from models.errors import ModelError
from models.loading.load import load_model
from models.progress import Progress
from models.weights.checkpoint import read_safetensors
from models.weights.safetensors_files import safetensors_files
from tests.models.checkpoints import (
    files_of,
    reference_model,
    run,
    tensors_in,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
)

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(files_of(folder), dtype=dtype, device=CPU)


def refusal(folder: Path) -> str:
    """Return the one-line error that loading a folder ends with."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", tiny_llama())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "model", tiny_llama(), max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_shards_make_the_same_model_as_one_file(sharded: Path, tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", tiny_llama())
    assert torch.equal(run(load(sharded), [1, 2, 3]), run(load(whole), [1, 2, 3]))


def test_every_parameter_is_filled_from_its_tensor(tmp_path: Path) -> None:
    config = tiny_qwen3(attention_bias=True)
    folder = write_checkpoint(tmp_path, config)
    theirs = reference_model(folder).state_dict()
    ours = load(folder)
    attention = ours.layers[1].attention
    prefix = "model.layers.1.self_attn."
    packed = [theirs[f"{prefix}{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(attention.qkv.weight, torch.cat(packed))
    assert torch.equal(attention.qkv.bias, torch.cat([theirs[f"{prefix}{n}_proj.bias"] for n in "qkv"]))
    norms = [theirs[f"{prefix}q_norm.weight"]] * 4 + [theirs[f"{prefix}k_norm.weight"]] * 2
    assert torch.equal(attention.head_norm, torch.stack(norms))
    assert ours.head.parts == (ours.embedding,)
    assert all(tensor.isfinite().all() for _, tensor in tensors_in(ours))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_any_float_type_becomes_the_wanted_one(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, tiny_llama(), dtype=stored)
    model = load(folder, wanted)
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert weight.dtype == stored
    assert torch.equal(model.embedding.data, weight.to(wanted))
    assert {tensor.dtype for _, tensor in tensors_in(model)} == {wanted}


def test_progress_counts_the_bytes_and_ends_full(sharded: Path) -> None:
    reports: list[Progress] = []
    load_model(files_of(sharded), dtype=torch.bfloat16, device=CPU, on_progress=reports.append)
    done = [report.done for report in reports]
    assert {report.stage for report in reports} == {"load"}
    assert done == sorted(done)
    assert done[0] == 0
    tensors = [load_file(path) for path in sharded.glob("*.safetensors")]
    assert done[-1] == reports[-1].total == sum(t.nbytes for file in tensors for t in file.values())


def test_peak_memory_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    config = tiny_llama(hidden_size=768, intermediate_size=2048, vocab_size=4000, num_hidden_layers=4)
    folder = write_checkpoint(tmp_path, config, max_shard_size="20MB")
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("the system does not tell a process its memory")

    def anonymous() -> int:
        match = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
        assert match is not None
        return int(match[1]) * 1024

    peak = before = anonymous()

    def watch(_: Progress) -> None:
        nonlocal peak
        peak = max(peak, anonymous())

    model = load_model(files_of(folder), dtype=torch.float32, device=CPU, on_progress=watch)
    size = model.nbytes
    largest = max(tensor.nbytes for _, tensor in tensors_in(model))
    assert size > 100e6
    assert peak - before < size + largest + 8e6


def test_redundant_tensors_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_qwen3())
    expected = run(load(folder), [1, 2])

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_tensors(folder, add)
    assert torch.equal(run(load(folder), [1, 2]), expected)


def test_files_named_otherwise_are_found(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert safetensors_files(folder) == [folder / "weights.safetensors"]
    load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    assert "lacks model.layers.2.mlp.up_proj.weight" in refusal(folder)


def test_several_missing_tensors_are_counted(folder: Path) -> None:
    change_tensors(
        folder, lambda tensors: [tensors.pop(f"model.layers.{n}.mlp.up_proj.weight") for n in (0, 1)]
    )
    assert "model.layers.0.mlp.up_proj.weight and 1 more" in refusal(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update(extra=torch.ones(3)))
    assert "extra" in refusal(folder)


def test_a_wrong_shape_is_told_with_the_right_one(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(95)}))
    message = refusal(folder)
    assert "model.norm.weight has the shape [95]" in message
    assert "[96]" in message


def test_a_config_for_another_size_is_told(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert "model.layers.2" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**24}))
    assert f"the config requires [96, {2**24}]" in refusal(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    change_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(96).to(torch.int8)})
    )
    assert "model.norm.weight" in refusal(folder)
    assert "I8" in refusal(folder)


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks lm_head.weight" in refusal(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"The shard {shard.name}" in refusal(sharded)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not valid JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"model.norm.weight": "../../etc/passwd"}}', "which is not there"),
        (json.dumps({"weight_map": {"model.norm.weight": "x" * 300}}), "which is not there"),
        ('{"weight_map": {"model.norm.weight": 3}}', "The shard 3"),
        ('{"weight_map": {"model.norm.weight": ".."}}', "The shard .."),
    ],
)
def test_a_damaged_index(index: str, words: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(index)
    assert words in refusal(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_reason(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message
    assert "pickle" in message


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(folder)


def test_a_file_cut_anywhere_is_damaged(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for length in (0, 1, 7, 8, 9, 100, header - 1, header, header + 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert "download it again" in refusal(folder), length
    path.write_bytes(data + b"x")
    assert "download it again" in refusal(folder)


def test_a_damaged_header_is_never_a_traceback(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    generator = torch.Generator().manual_seed(3)
    refused = 0
    for _ in range(200):
        at = int(torch.randint(header, (), generator=generator))
        value = int(torch.randint(256, (), generator=generator))
        path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
        try:
            load(folder)
        except ModelError:
            refused += 1
    assert refused > 100


def test_a_weights_file_that_is_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "download it again" in refusal(folder)


def test_too_little_memory_is_told_before_anything_is_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.loading.load, "available_bytes", lambda device: 200_000)
    monkeypatch.setattr(
        models.loading.load._Filling, "allocate", lambda *_: pytest.fail("memory was allocated")
    )
    message = refusal(folder)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()) + 256 * 16 * 4
    assert f"{size / 1e3:.0f} kB" in message
    assert "200 kB are free" in message


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")],
)
def test_memory_that_runs_out_while_loading_is_one_line(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(models.loading.load._Filling, "allocate", fail)
    assert "Memory ran out" in refusal(folder)


def test_this_machine_says_what_is_free() -> None:
    available = models.weights.memory.available_bytes(CPU)
    assert available is None or available > 1_000_000


def test_tensors_are_listed_without_being_read(folder: Path) -> None:
    tensors = {tensor.name: tensor for tensor in read_safetensors(folder)}
    assert tensors["model.norm.weight"].shape == (96,)
    assert tensors["model.norm.weight"].nbytes == 96 * 4
