"""Random weights in published shapes: every reader of checkpoints finds in them what the shapes say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from benchmarks.cpu_chat import use_variant
from benchmarks.kv_memory import our_bytes, transformers_bytes
from benchmarks.random_checkpoint import hf_config, shortened, with_vocabulary, write_checkpoint
from benchmarks.random_gguf import LATENTS, write_random_gguf
from engine import Engine, SamplingParams
from engine.execute.compatibility import not_native
from engine.kernels.native import library as native
from engine.machine.shapes import CONFIGS, known_shape
from models.families.registry import load_spec, spec_of_hf
from models.files import ModelFiles
from models.spec import ModelSpec, kv_sources
from models.weights.slots import parameters, slots

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 8,
    "num_experts": 8,
    "top_k_experts": 2,
    "head_dim": 16,
    "global_head_dim": 32,
}


def small(name: str, layers: int) -> dict[str, Any]:
    """Return a model of the catalogue with fewer and smaller layers."""
    raw = with_vocabulary(shortened(CONFIGS[name], layers), 320)
    return raw | {key: value for key, value in SMALL.items() if key in raw}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_counts_the_same_weights(name: str) -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(hf_config(CONFIGS[name]))
    tensors = {id(tensor): tensor.numel() for tensor in network.state_dict(keep_vars=True).values()}
    assert sum(tensors.values()) == parameters(known_shape(name))


@pytest.mark.parametrize(
    ("name", "layers"), [("gemma4:e2b", 10), ("lfm2.5:8b-a1b", 6), ("granite4:1b", 2), ("hunyuan:1.8b", 2)]
)
def test_a_checkpoint_can_be_run(name: str, layers: int, tmp_path: Path) -> None:
    raw = small(name, layers)
    write_checkpoint(tmp_path, raw, torch.device("cpu"))
    assert slots_of(load_spec(ModelFiles(name, folder=tmp_path))) == slots_of(spec_of_hf(raw)[1])
    engine = Engine.load(str(tmp_path), device="cpu", context=64)
    try:
        prompt = engine.tokenizer.encode("lamp")
        assert len(list(engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=3)))) == 3
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *(("qwen3:0.6b", 2), ("qwen3:30b-a3b", 2), ("gemma4:e2b", 10), ("gemma4:26b-a4b", 6)),
        *(("lfm2.5:1.2b", 3), ("lfm2.5:8b-a1b", 4), ("qwen3.5:0.8b", 4), ("qwen3.5:35b-a3b", 4)),
    ],
)
def test_a_gguf_file_has_the_network_that_was_asked_for(name: str, layers: int, tmp_path: Path) -> None:
    spec = spec_of_hf(small(name, layers))[1]
    path = tmp_path / "random.gguf"
    write_random_gguf(path, spec, GGMLQuantizationType.Q8_0, 2048)
    found = load_spec(ModelFiles(name, gguf=path))
    assert slots_of(found) == slots_of(replace(spec, vocab_size=found.vocab_size))
    assert kv_sources(found) == kv_sources(spec)
    assert [layer.mixer.window for layer in found.layers] == [layer.mixer.window for layer in spec.layers]
    assert not_native(found) is None


@pytest.mark.parametrize("name", LATENTS)
def test_so_it_has_with_latent_attention(name: str, tmp_path: Path) -> None:
    spec = replace(LATENTS[name], layers=LATENTS[name].layers[:2], vocab_size=512)
    path = tmp_path / "random.gguf"
    write_random_gguf(path, spec, GGMLQuantizationType.Q4_0, 2048)
    found = load_spec(ModelFiles(name, gguf=path))
    assert slots_of(found) == slots_of(replace(spec, vocab_size=found.vocab_size))
    assert not_native(found) is None


def test_the_variant_of_the_kernels_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.problem() is not None:
        pytest.skip("there is no library")
    monkeypatch.setattr(native.NativeLibrary, "best", native.NativeLibrary.best)  # to be put back
    use_variant("portable")
    assert native.library().best_name == "portable C++"


def slots_of(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.group, slot.shape) for slot in slots(spec)]


def test_the_cache_of_transformers_keeps_the_windows_of_gemma_4() -> None:
    spec = known_shape("gemma4:31b")
    local, whole = 50 * 2 * 1023 * 16 * 256 * 2, 10 * 2 * 32_768 * 4 * 512 * 2
    assert transformers_bytes("gemma4:31b", spec, 32_768) == local + whole
    assert our_bytes(spec, 32_768) == local * 1024 // 1023 + whole <= 3.4 * (1 << 30)
    plain = known_shape("qwen3:0.6b")
    assert transformers_bytes("qwen3:0.6b", plain, 1000) == our_bytes(plain, 1000)
