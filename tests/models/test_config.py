"""ModelConfig from config.json and from GGUF metadata, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import ModelError
from models.families.config import ModelConfig, RopeParameters, load_config
from models.hub.sources import ModelFiles

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "rope_scaling": None, "sliding_window": None}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
}


def test_qwen3() -> None:
    assert ModelConfig.from_hf(QWEN3) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters=RopeParameters(1e6),
    )


def test_llama_with_its_old_rope_scaling() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config.head_dim == 64
    assert config.rope_parameters == RopeParameters(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA["rope_scaling"]},
            {**LLAMA["rope_scaling"], "rope_theta": 5e5},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0},
        ),
    ],
)
def test_both_ways_to_write_rope_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    plain = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    assert ModelConfig.from_hf(plain | old) == ModelConfig.from_hf(plain | {"rope_parameters": new})


def test_what_transformers_leaves_out_has_its_defaults() -> None:
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    raw = {key: LLAMA[key] for key in (*needed, "architectures", "max_position_embeddings")}
    config = ModelConfig.from_hf(raw)
    assert (config.num_key_value_heads, config.tie_word_embeddings) == (32, False)
    assert (config.rms_norm_eps, config.rope_parameters) == (1e-6, RopeParameters(10_000.0))


def test_without_architectures_the_model_type_counts() -> None:
    raw = QWEN3 | {"architectures": None}
    assert ModelConfig.from_hf(raw) == ModelConfig.from_hf(QWEN3)


def test_mistral_without_a_window_is_llama_without_biases() -> None:
    config = ModelConfig.from_hf(MISTRAL | {"attention_bias": True, "mlp_bias": True})
    assert (config.attention_bias, config.mlp_bias) == (False, False)
    # A window that the context cannot reach is none.
    assert ModelConfig.from_hf(MISTRAL | {"sliding_window": 131072, "architectures": ["MistralForCausalLM"]})


def test_gguf() -> None:
    assert ModelConfig.from_gguf(GGUF) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=RopeParameters(100_000.0),
    )


def test_gguf_rope_scaling_and_vocabulary() -> None:
    raw = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    raw["tokenizer.ggml.tokens"] = ["a"] * 77
    config = ModelConfig.from_gguf(raw, tie_word_embeddings=False, frequency_factors=(1.0,) * 32)
    assert config.rope_parameters == RopeParameters(1e5, "linear", 4.0, frequency_factors=(1.0,) * 32)
    assert (config.vocab_size, config.tie_word_embeddings) == (77, False)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (
            QWEN3,
            {"architectures": ["Gemma3ForCausalLM"]},
            ["Gemma3ForCausalLM", "Qwen3ForCausalLM, LlamaFor"],
        ),
        (QWEN3, {"architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM"]),
        (QWEN3, {"architectures": [], "model_type": "mamba"}, ["mamba"]),
        (QWEN3, {"architectures": None, "model_type": None}, ["None"]),
        (QWEN3, {"architectures": [["x"]]}, ["not supported"]),
        (QWEN3, {"vocab_size": None}, ["no vocab_size"]),
        (QWEN3, {"hidden_size": "1024"}, ["hidden_size", "1024", "whole number"]),
        (QWEN3, {"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        (QWEN3, {"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        (QWEN3, {"num_hidden_layers": True}, ["num_hidden_layers"]),
        (QWEN3, {"intermediate_size": 10.5}, ["intermediate_size"]),
        (QWEN3, {"rms_norm_eps": -1}, ["rms_norm_eps"]),
        (QWEN3, {"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        (QWEN3, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        (QWEN3, {"num_key_value_heads": 5}, ["num_attention_heads 16", "num_key_value_heads 5"]),
        (QWEN3, {"head_dim": 127}, ["head_dim 127"]),
        (QWEN3, {"hidden_act": "gelu"}, ["gelu", "silu"]),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 4096}, ["sliding window of 4096"]),
        (QWEN3, {"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
        (QWEN3, {"rope_scaling": {"rope_type": ["x"]}}, ["RoPE"]),
        (QWEN3, {"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        (QWEN3, {"rope_scaling": {"rope_type": "linear"}}, ["no factor"]),
        (QWEN3, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        (QWEN3, {"quantization_config": {"quant_method": "gptq"}}, ["quantised", "GGUF"]),
        (LLAMA, {"rope_scaling": {**LLAMA["rope_scaling"], "low_freq_factor": 4.0}}, ["low_freq_factor"]),
        (LLAMA, {"head_dim": None, "hidden_size": 2049}, ["no head_dim"]),
        (MISTRAL, {"sliding_window": 4096}, ["sliding window of 4096"]),
    ],
)
def test_what_cannot_be_run_is_one_line(
    base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(base | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistral_that_does_not_name_its_window_has_one() -> None:
    raw = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(ModelError, match="sliding window of 4096"):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma3"}, ["gemma3", "qwen3, llama"]),
        ({"general.architecture": ["llama"]}, ["not supported"]),
        ({"llama.expert_count": 8}, ["mixture of experts"]),
        ({"llama.attention.sliding_window": 4096}, ["sliding-window"]),
        ({"llama.rope.dimension_count": 32}, ["llama.rope.dimension_count is 32", "64"]),
        ({"llama.attention.value_length": 32}, ["llama.attention.value_length"]),
        ({"llama.rope.scaling.type": "yarn"}, ["yarn"]),
        ({"llama.attention.head_count_kv": [3, 3]}, ["llama.attention.head_count_kv"]),
        ({"llama.block_count": None}, ["no llama.block_count"]),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, ["layer_norm_rms_epsilon"]),
    ],
)
def test_gguf_metadata_that_cannot_be_run_is_one_line(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_gguf(GGUF | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_gguf_rope_factors_of_another_head_size() -> None:
    with pytest.raises(ModelError, match="needs 32"):
        ModelConfig.from_gguf(GGUF, frequency_factors=(1.0,) * 16)


def test_load_config_reads_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert load_config(ModelFiles("x", folder=tmp_path)) == ModelConfig.from_hf(QWEN3)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (None, "has no config.json"),
        (b"", "not valid JSON"),
        (b'{"architectures": ["Qwen3', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "not a JSON object"),
    ],
)
def test_a_folder_without_a_readable_config(contents: bytes | None, words: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(ModelError, match=words):
        load_config(ModelFiles("x", folder=tmp_path))


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        load_config(ModelFiles("x", folder=tmp_path))


def test_files_without_any_file() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file"):
        load_config(ModelFiles("x"))
