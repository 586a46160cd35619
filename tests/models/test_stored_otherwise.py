"""Checkpoints that store something else than their config says, or under other names, and still make a model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.errors import ModelError
from models.families.registry import spec_of_gguf
from models.loading.load import load_model
from models.weights.gguf import read_gguf
from tests.models.checkpoints import (
    files_of,
    random_model,
    reference_model,
    run,
    run_reference,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)
from tests.models.families import FAMILIES, tiny_gemma2, tiny_gpt2
from tests.models.quantized_models import CASES, write

CPU = torch.device("cpu")
TOKENS = [*range(3, 40)]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(path: Path, **options: Any) -> Any:
    return load_model(files_of(path), dtype=torch.float32, device=CPU, **options)


def logits(path: Path, **options: Any) -> Tensor:
    return run(load(path, **options), TOKENS)


def change(folder: Path, how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    path = folder / "model.safetensors"
    save_file(how(load_file(path)), path, metadata={"format": "pt"})
    return folder


def say_tied(folder: Path, tied: bool = True) -> Path:
    """Have the config say that embedding and head are one matrix."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))
    return folder


def assert_those_of_transformers(folder: Path) -> None:
    expected = run_reference(reference_model(folder), TOKENS)
    torch.testing.assert_close(logits(folder), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


class TestTied:
    """The config ties head and embedding."""

    @pytest.mark.parametrize(
        "config",
        [tiny_llama(), tiny_gemma2(tie_word_embeddings=False), tiny_gpt2(tie_word_embeddings=False)],
        ids=["llama", "gemma2", "gpt2"],
    )
    def test_a_stored_head_counts(self, config: Any, tmp_path: Path) -> None:
        notes: list[str] = []
        folder = say_tied(write_checkpoint(tmp_path, config))
        load(folder, on_note=notes.append)
        assert ["has a head of its own" in note for note in notes] == [True]
        assert_those_of_transformers(folder)

    @pytest.mark.parametrize(
        "options",
        [
            {"quantize": "int8"},
            {"packs": lambda spec: True, "quantize": "int4"},
            {"rank": (0, 2)},
            {"rank": (1, 2)},
        ],
        ids=["int8", "planes", "rank 0", "rank 1"],
    )
    def test_a_stored_head_counts_however_it_is_held(self, options: dict[str, Any], tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, tiny_llama())
        expected, found = load(folder, **options), load(say_tied(folder), **options)
        assert not found.spec.tied
        assert torch.equal(found.head.parts[0].data, expected.head.parts[0].data)

    @pytest.mark.parametrize("case", ["awq", "fp8, blocks"])
    def test_a_stored_head_counts_beside_quantized_matrices(self, case: str, tmp_path: Path) -> None:
        write(tmp_path, CASES[case])
        expected = logits(tmp_path)
        assert torch.equal(logits(say_tied(tmp_path)), expected)

    def test_a_quantized_head_counts_beside_a_plain_embedding(self, tmp_path: Path) -> None:
        case = CASES["packed, 8 bits, 64"]
        parts, _ = case.quantize(torch.randn(160, 256, generator=torch.Generator().manual_seed(0)))
        write(tmp_path, case, {HEAD: None} | {f"lm_head.{key}": value for key, value in parts.items()})
        expected = logits(tmp_path)
        assert torch.equal(logits(say_tied(tmp_path)), expected)

    def test_a_copy_of_the_embedding_is_no_head_of_its_own(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, tiny_qwen3())
        change(folder, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].clone()})
        notes: list[str] = []
        assert load(folder, on_note=notes.append).spec.tied
        assert not notes

    @pytest.mark.parametrize("config", [tiny_qwen3(), tiny_gpt2()], ids=["qwen3", "gpt2"])
    def test_a_head_that_is_stored_alone_is_the_embedding(self, config: Any, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, config)
        embedding = EMBEDDING if config.model_type == "qwen3" else "transformer.wte.weight"
        change(folder, lambda tensors: tensors | {HEAD: tensors.pop(embedding)})
        assert load(folder).spec.tied
        assert_those_of_transformers(folder)

    @pytest.mark.parametrize("shape", [(160,), (160, 0), ()])
    def test_embedding_and_head_of_an_impossible_shape_are_told(
        self, shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        folder = write_checkpoint(tmp_path, tiny_qwen3())
        change(folder, lambda tensors: tensors | {HEAD: torch.ones(shape), EMBEDDING: torch.ones(shape)})
        with pytest.raises(ModelError, match="has the shape"):
            load(folder)

    def test_a_head_of_another_size_is_told(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, tiny_qwen3())
        change(folder, lambda tensors: tensors | {HEAD: torch.ones(159, 48)})
        with pytest.raises(ModelError, match=r"lm_head.weight has the shape \[159, 48\]"):
            load(folder)


@pytest.mark.parametrize("name", ["mtp.layers.0.x.weight", "model.mtp.norm.weight", "model.mtp_block.0.w"])
def test_tensors_that_predict_tokens_ahead_are_not_needed(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_llama())
    assert_those_of_transformers(change(folder, lambda tensors: tensors | {name: torch.ones(3)}))


@pytest.mark.parametrize(
    "config", [tiny_llama(), tiny_qwen3(), FAMILIES["phi3"]], ids=["llama", "qwen3", "phi3"]
)
def test_names_may_lack_the_prefix(config: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config)
    change(folder, lambda tensors: {name.removeprefix("model."): each for name, each in tensors.items()})
    assert_those_of_transformers(folder)


class TestTwice:
    """Several tensors have the same name."""

    def test_the_shard_that_the_index_names_counts(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, tiny_llama(), max_shard_size="200KB")
        expected = logits(folder)
        shards = sorted(folder.glob("*.safetensors"))
        stored = [load_file(shard) for shard in shards]
        for place, other in ((0, 1), (1, 0)):
            stale = {name: torch.zeros_like(each) for name, each in stored[other].items()}
            save_file(stale | stored[place], shards[place])
        assert torch.equal(logits(folder), expected)

    def test_an_index_that_names_a_shard_without_the_tensor(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, tiny_llama(), max_shard_size="200KB")
        expected = logits(folder)
        index = folder / "model.safetensors.index.json"
        told = json.loads(index.read_text())
        shards = sorted(set(told["weight_map"].values()))
        name = next(name for name, shard in told["weight_map"].items() if shard == shards[0])
        told["weight_map"][name] = shards[1]
        index.write_text(json.dumps(told))
        assert torch.equal(logits(folder), expected)

    def test_without_an_index_it_is_told(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, tiny_llama())
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        save_file({"model.norm.weight": torch.ones(96)}, folder / "other.safetensors")
        with pytest.raises(ModelError, match=r"model.norm.weight twice, and no index"):
            load(folder)

    def test_what_is_not_used_is_told_as_such(self, tmp_path: Path) -> None:
        folder = change(write_checkpoint(tmp_path, tiny_llama()), lambda t: t | {"extra": torch.ones(3)})
        with pytest.raises(
            ModelError, match=r"extra, which LlamaForCausalLM with this config does not use; the"
        ):
            load(folder)


class TestSizesOfEveryLayer:
    """A GGUF file has a list of sizes, one for each layer."""

    @pytest.mark.parametrize("name", ["qwen3", "granite moe", "gpt2", "gemma2"])
    def test_equal_ones_are_one_size(self, name: str, tmp_path: Path) -> None:
        config = {"qwen3": tiny_qwen3(), **FAMILIES}[name]
        file = read_gguf(write_gguf(tmp_path / "model.gguf", random_model(config)))
        architecture, layers = file.metadata["general.architecture"], config.num_hidden_layers
        listed = {
            key: [value] * layers
            for key, value in file.metadata.items()
            if key.startswith(f"{architecture}.") and type(value) in (int, float)
        }
        del listed[f"{architecture}.block_count"]
        assert len(listed) >= 6
        assert spec_of_gguf(replace(file, metadata=file.metadata | listed))[1] == spec_of_gguf(file)[1]

    @pytest.mark.parametrize("sizes", [[2, 2, 1], [2, 2]])
    def test_others_are_refused(self, sizes: list[int], tmp_path: Path) -> None:
        file = read_gguf(write_gguf(tmp_path / "model.gguf", random_model(tiny_qwen3())))
        changed = replace(file, metadata=file.metadata | {"qwen3.attention.head_count_kv": sizes})
        with pytest.raises(ModelError, match=r"head_count_kv in the GGUF file .* the same for all layers"):
            spec_of_gguf(changed)

    def test_a_pattern_of_windows_stays_a_list(self, tmp_path: Path) -> None:
        metadata = {"qwen3.attention.sliding_window": 8, "qwen3.attention.sliding_window_pattern": [0, 0, 0]}
        file = read_gguf(write_gguf(tmp_path / "m.gguf", random_model(tiny_qwen3()), metadata=metadata))
        assert [layer.attention.window for layer in spec_of_gguf(file)[1].layers] == [None] * 3
