"""The description of a network from config.json and from GGUF metadata, and the configs that are refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ModelError
from models.families.common import pre_norm_layer, uniform
from models.families.registry import load_spec, spec_of_gguf, spec_of_hf
from models.features import Feature, features
from models.files import ModelFiles
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope
from models.weights.block_formats import Kind
from models.weights.gguf import GGUFFile, GGUFTensor
from models.weights.slots import parameters
from tests.models.known_configs import ERNIE, ERNIE_MOE, GEMMA2, GEMMA3, GEMMA3_IMAGES, GPT2, QWEN3_MOE

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
MISTRAL_IMAGES = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {}}
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


def hf(raw: dict[str, Any]) -> ModelSpec:
    return spec_of_hf(raw)[1]


def gguf(metadata: dict[str, Any], tied: bool = True, factors: int = 0) -> ModelSpec:
    """Read GGUF metadata with `factors` values of 1 in rope_freqs.weight."""

    def tensor(name: str, count: int) -> GGUFTensor:
        data = np.ones((1, count), dtype="<f4").view(np.uint8)
        return GGUFTensor(name, (count,), Kind.F32, data, Path("model.gguf"), 0)

    names = {"rope_freqs.weight": factors, "output.weight": 0 if tied else 1}
    tensors = {name: tensor(name, count) for name, count in names.items() if count}
    return spec_of_gguf(GGUFFile(Path("x.gguf"), metadata, tensors))[1]


def test_qwen3() -> None:
    assert hf(QWEN3) == uniform(
        "Qwen3ForCausalLM",
        layers=28,
        vocab_size=151936,
        hidden_size=1024,
        max_positions=40960,
        layer=pre_norm_layer(
            Attention(16, 8, 128, head_norm=Norm(1e-6), rope=Rope(1e6)), FeedForward(3072), Norm(1e-6)
        ),
        tied=True,
    )


def test_llama_with_its_old_rope_scaling() -> None:
    config = hf(LLAMA)
    assert config.attention.head_dim == 64
    assert config.attention.rope == Rope(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)


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
    assert hf(plain | old) == hf(plain | {"rope_parameters": new})


def test_what_transformers_leaves_out_has_its_defaults() -> None:
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    raw = {key: LLAMA[key] for key in (*needed, "architectures", "max_position_embeddings")}
    config = hf(raw)
    assert (config.attention.kv_heads, config.tied) == (32, False)
    assert (config.final_norm.eps, config.attention.rope) == (1e-6, Rope(10_000.0))


EXPERTS = Experts(128, 8, FeedForward(768))


GEMMA_NORM = Norm(1e-6, offset=1.0)


def test_gemma2() -> None:
    spec = hf(GEMMA2)
    assert [layer.attention.window for layer in spec.layers] == [4096, None] * 13
    assert {replace(layer.attention, window=None) for layer in spec.layers} == {
        Attention(8, 4, 256, rope=Rope(1e4), score_cap=50.0)
    }
    first = spec.layers[0]
    assert first.feed_forward == FeedForward(9216, "gelu_tanh")
    norms = (first.attention_norm, first.attention_post_norm, first.feed_forward_norm)
    assert {*norms, first.feed_forward_post_norm, spec.final_norm} == {GEMMA_NORM}
    assert (spec.embedding_scale, spec.logit_cap, spec.tied) == (48.0, 30.0, True)
    assert 2.61e9 < parameters(spec) < 2.62e9
    old = {
        key: value for key, value in GEMMA2.items() if "softcapping" not in key and key != "sliding_window"
    }
    assert hf(old) == spec
    assert hf(GEMMA2 | {"query_pre_attn_scalar": 144}).attention.scale == 1 / 12


def test_gemma3() -> None:
    spec = hf(GEMMA3)
    local = Attention(4, 1, 256, head_norm=GEMMA_NORM, rope=Rope(1e4), window=512)
    whole = replace(local, rope=Rope(1e6), window=None)
    assert [layer.attention for layer in spec.layers] == ([local] * 5 + [whole]) * 4 + [local] * 2
    assert (spec.logit_cap, spec.vocab_size, spec.tied) == (None, 262144, True)
    assert 0.99e9 < parameters(spec) < 1.01e9
    new = {key: value for key, value in GEMMA3.items() if not key.startswith("rope_")}
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = [f"{'full' if i % 6 == 5 else 'sliding'}_attention" for i in range(26)]
    assert hf(new | {"rope_parameters": ropes, "layer_types": kinds}) == spec


def test_gemma3_with_images_is_its_text_part() -> None:
    spec = hf(GEMMA3_IMAGES)
    assert (spec.architecture, spec.vocab_size, spec.max_positions) == (
        "Gemma3ForConditionalGeneration",
        262208,
        131072,
    )
    local = Attention(8, 4, 256, head_norm=GEMMA_NORM, rope=Rope(1e4), window=1024)
    assert spec.layers[0].attention == local
    assert spec.layers[5].attention == replace(local, rope=Rope(1e6, "linear", 8.0), window=None)
    assert 3.8e9 < parameters(spec) < 3.9e9


def test_gpt2() -> None:
    spec = hf(GPT2)
    norm = Norm(1e-5, "layer", bias=True)
    assert replace(spec, learned_positions=False) == uniform(
        "GPT2LMHeadModel",
        layers=12,
        vocab_size=50257,
        hidden_size=768,
        max_positions=1024,
        layer=pre_norm_layer(
            Attention(12, 12, 64, qkv_bias=True, out_bias=True),
            FeedForward(3072, "gelu_tanh", gated=False, bias=True),
            norm,
        ),
        tied=True,
    )
    assert spec.learned_positions
    assert parameters(spec) == 124_439_808
    assert hf({"architectures": ["GPT2LMHeadModel"]}) == spec


def test_ernie() -> None:
    spec = hf(ERNIE)
    rope = Rope(5e5, interleaved=True, exact=True)
    assert spec == uniform(
        "Ernie4_5ForCausalLM",
        layers=18,
        vocab_size=103424,
        hidden_size=1024,
        max_positions=131072,
        layer=pre_norm_layer(Attention(16, 2, 128, rope=rope), FeedForward(3072), Norm(1e-5)),
        tied=True,
    )
    assert 0.35e9 < parameters(spec) < 0.37e9
    given = ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "use_bias")
    assert hf({key: value for key, value in ERNIE.items() if key not in given}) == spec
    assert hf(ERNIE | {"architectures": None}) == spec


def test_ernie_moe() -> None:
    spec = hf(ERNIE_MOE)
    assert spec.layers[0].feed_forward == FeedForward(12288)
    assert {layer.feed_forward for layer in spec.layers[1:]} == {
        Experts(64, 6, FeedForward(1536), exact_router=True, selection_bias=True, shared=FeedForward(3072))
    }
    assert spec.attention.head_dim == 128
    assert 21.5e9 < parameters(spec) < 22.0e9
    some = hf(ERNIE_MOE | {"moe_layer_start_index": 3, "moe_layer_interval": 2, "moe_layer_end_index": 8})
    sparse = [i for i, layer in enumerate(some.layers) if isinstance(layer.feed_forward, Experts)]
    assert sparse == [3, 5, 7]


def test_qwen3_moe() -> None:
    spec = hf(QWEN3_MOE)
    assert spec == uniform(
        "Qwen3MoeForCausalLM",
        layers=48,
        vocab_size=151936,
        hidden_size=2048,
        max_positions=40960,
        layer=pre_norm_layer(
            Attention(32, 4, 128, head_norm=Norm(1e-6), rope=Rope(1e6)), EXPERTS, Norm(1e-6)
        ),
        tied=False,
    )
    assert 30.5e9 < parameters(spec) < 30.6e9
    # If its window is used, it applies to all layers.
    windowed = hf(QWEN3_MOE | {"use_sliding_window": True, "max_window_layers": 24, "sliding_window": 4096})
    assert {layer.attention.window for layer in windowed.layers} == {4096}


def test_qwen3_moe_with_dense_layers() -> None:
    spec = hf(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False})
    sparse = [i for i, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, Experts)]
    assert sparse == [1, *range(5, 48, 2)]
    assert spec.layers[1].feed_forward == replace(EXPERTS, renormalise=False)
    assert spec.layers[3].feed_forward == FeedForward(6144)


def test_without_architectures_the_model_type_counts() -> None:
    raw = QWEN3 | {"architectures": None}
    assert hf(raw) == hf(QWEN3)


def test_mistral_without_a_window_is_llama_without_biases() -> None:
    config = hf(MISTRAL | {"attention_bias": True, "mlp_bias": True})
    assert not features(config)
    # A window that the context cannot reach has no effect.
    assert hf(MISTRAL | {"sliding_window": 131072}) == config


def test_gguf() -> None:
    assert gguf(GGUF) == uniform(
        "LlamaForCausalLM",
        layers=30,
        vocab_size=49152,
        hidden_size=576,
        max_positions=8192,
        layer=pre_norm_layer(Attention(9, 3, 64, rope=Rope(1e5)), FeedForward(1536), Norm(1e-5)),
        tied=True,
    )


def test_gguf_rope_scaling_and_vocabulary() -> None:
    raw = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    raw["tokenizer.ggml.tokens"] = ["a"] * 77
    config = gguf(raw, tied=False, factors=32)
    assert config.attention.rope == Rope(1e5, "linear", 4.0, frequency_factors=(1.0,) * 32)
    assert (config.vocab_size, config.tied) == (77, False)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (
            QWEN3,
            {"architectures": ["MambaForCausalLM"]},
            ["MambaForCausalLM", "`chatterm show` lists what is supported"],
        ),
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
        (QWEN3, {"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
        (QWEN3, {"rope_scaling": {"rope_type": "axial"}}, ["axial", "yarn"]),
        (QWEN3, {"rope_scaling": {"rope_type": ["x"]}}, ["RoPE"]),
        (QWEN3, {"rope_theta": 1.0}, ["rope_theta", "above 1"]),
        (QWEN3, {"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        (QWEN3, {"rope_scaling": {"rope_type": "linear"}}, ["no factor"]),
        (QWEN3, {"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "192"]),
        (QWEN3, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["no short_factor"]),
        (
            QWEN3,
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            ["short_factor", "64 numbers"],
        ),
        (
            QWEN3,
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 63 + [-1]}},
            ["short_factor", "above 0"],
        ),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers", "from 0"]),
        (QWEN3, {"quantization_config": {"quant_method": "hqq"}}, ["quantised", "hqq", "GGUF"]),
        (LLAMA, {"rope_scaling": {**LLAMA["rope_scaling"], "low_freq_factor": 5.0}}, ["low_freq_factor"]),
        (GEMMA2, {"hidden_activation": "silu"}, ["hidden_activation silu", "gelu_pytorch_tanh"]),
        (GEMMA2, {"layer_types": ["full_attention"]}, ["layer_types", "26"]),
        (GEMMA2, {"attn_logit_softcapping": "yes"}, ["attn_logit_softcapping"]),
        (GEMMA3, {"use_bidirectional_attention": True}, ["later tokens"]),
        (GEMMA3, {"rope_parameters": [1]}, ["rope_parameters", "object"]),
        (GEMMA3_IMAGES, {"text_config": 7}, ["text_config", "object"]),
        (MISTRAL_IMAGES, {"text_config": {"model_type": "mistral4"}}, ["text part", "mistral4"]),
        (GPT2, {"activation_function": "mish"}, ["activation_function mish", "gelu_new"]),
        (GPT2, {"add_cross_attention": True}, ["another network"]),
        (GPT2, {"n_head": 7}, ["768", "7 heads"]),
        (ERNIE_MOE, {"use_bias": True}, ["use_bias", "experts"]),
        (ERNIE_MOE, {"moe_norm_min": 0.1}, ["moe_norm_min", "1e-12"]),
        (ERNIE_MOE, {"moe_layer_start_index": [1, 2]}, ["moe_layer_start_index", "whole number from 0"]),
        (QWEN3_MOE, {"num_experts_per_tok": 200}, ["200 of 128 experts"]),
        (QWEN3_MOE, {"mlp_only_layers": "all"}, ["mlp_only_layers", "list"]),
        (QWEN3_MOE, {"num_experts": 0}, ["num_experts"]),
        (LLAMA, {"head_dim": None, "hidden_size": 2049}, ["no head_dim"]),
    ],
)
def test_what_cannot_be_run_is_one_line(
    base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        hf(base | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistral_that_does_not_name_its_window_has_one() -> None:
    raw = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert {layer.attention.window for layer in hf(raw).layers} == {4096}
    assert features(hf(raw)) == {Feature.WINDOW}


def test_only_the_layers_that_are_named_have_a_window() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 25
    spec = hf(QWEN3 | {"use_sliding_window": True, "sliding_window": 512, "layer_types": kinds})
    assert [layer.attention.window for layer in spec.layers] == [512] * 3 + [None] * 25
    assert Feature.MIXED_LAYERS in features(spec)


def test_a_window_in_a_gguf_file_is_that_of_the_layers_it_names() -> None:
    change: dict[str, Any] = {"llama.attention.sliding_window": 4096}
    assert {layer.attention.window for layer in gguf(GGUF | change).layers} == {4096}
    change["llama.attention.sliding_window_pattern"] = [True] * 29 + [False]
    assert [layer.attention.window for layer in gguf(GGUF | change).layers] == [4096] * 29 + [None]


def test_yarn_and_longrope_of_gguf_files() -> None:
    at = "llama.rope.scaling."
    raw = GGUF | {f"{at}type": "yarn", f"{at}factor": 4.0, f"{at}original_context_length": 2048}
    plain = Rope(1e5, "yarn", 4.0, original_positions=2048, attention_factor=1 + 0.1 * math.log(4))
    assert gguf(raw).attention.rope == plain
    more = {f"{at}yarn_attn_factor": 1.5, f"{at}yarn_beta_fast": 16.0, f"{at}yarn_beta_slow": 2.0}
    assert gguf(raw | more).attention.rope == replace(plain, attention_factor=1.5, beta_fast=16, beta_slow=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "mamba"}, ["mamba", "`chatterm show` lists what is supported"]),
        ({"general.architecture": ["llama"]}, ["not supported"]),
        ({"llama.expert_count": 8}, ["mixture of experts"]),
        ({"llama.rope.dimension_count": 32}, ["llama.rope.dimension_count is 32", "64"]),
        ({"llama.attention.value_length": 32}, ["llama.attention.value_length"]),
        ({"llama.rope.scaling.type": "dynamic"}, ["dynamic", "yarn"]),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            ["yarn with a log multiplier"],
        ),
        ({"llama.attention.head_count_kv": [3, 3]}, ["llama.attention.head_count_kv"]),
        ({"llama.block_count": None}, ["no llama.block_count"]),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, ["layer_norm_rms_epsilon"]),
    ],
)
def test_gguf_metadata_that_cannot_be_run_is_one_line(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        gguf(GGUF | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_gguf_rope_factors_of_another_head_size() -> None:
    with pytest.raises(ModelError, match="needs 32"):
        gguf(GGUF, factors=16)


def test_load_spec_reads_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert load_spec(ModelFiles("x", folder=tmp_path)) == hf(QWEN3)


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
        load_spec(ModelFiles("x", folder=tmp_path))


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        load_spec(ModelFiles("x", folder=tmp_path))


def test_files_without_any_file() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file"):
        load_spec(ModelFiles("x"))
