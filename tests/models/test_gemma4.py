"""Gemma 4: the configs of the published models, what each part adds to the logits, tensors that are not used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from models.errors import ModelError
from models.families.registry import load_spec, spec_of_hf
from models.features import Feature, features
from models.loading.load import load_model
from models.reference.rope import inverse_frequencies
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope, each_attention, each_layer
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.tokenizer import Tokenizer
from models.weights.slots import parameters
from tests.models.checkpoints import (
    VOCAB_SIZE,
    files_of,
    random_model,
    run,
    run_reference,
    write_checkpoint,
    write_gguf,
)
from tests.models.families import GGUF, tiny_gemma4, tiny_gemma4_moe

CPU = torch.device("cpu")
TOKENS = list(range(3, 40))
NORM = Norm(1e-6, rounds_last=True)
WHOLE = Rope(1e6, frequency_factors=(1.0,) * 64 + (float("inf"),) * 192)
LOCAL = Rope(1e4)


def kinds(layers: int, period: int) -> list[str]:
    """Return the types of layers, of which one in each period sees all tokens."""
    return [f"{'sliding' if (i + 1) % period else 'full'}_attention" for i in range(layers)]


COMMON: dict[str, Any] = {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
E2B = COMMON | {
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": kinds(35, 5),
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_double_wide_mlp": True,
}
E4B = E2B | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_types": kinds(42, 6),
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "use_double_wide_mlp": False,
}
LARGE = COMMON | {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": None,
    "max_position_embeddings": 262144,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_double_wide_mlp": False,
}
A4B = LARGE | {  # 26B-A4B
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": kinds(30, 6),
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
DENSE = LARGE | {  # 31B
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "layer_types": kinds(60, 6),
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
}
UNIFIED = LARGE | {  # 12B
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "layer_types": kinds(48, 6),
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "use_bidirectional_attention": "vision",
}
OF_ALL = {
    *(Feature.ACTIVATION, Feature.EMBEDDING_SCALE, Feature.HEAD_NORM, Feature.LAYER_SCALE, Feature.LOGIT_CAP),
    *(Feature.MIXED_HEADS, Feature.MIXED_LAYERS, Feature.NORM_PLACE, Feature.NORM_ROUNDING, Feature.SCALE),
    *(Feature.VALUE_NORM, Feature.WINDOW),
}
OF_SMALL = OF_ALL | {Feature.LAYER_INPUTS, Feature.SHARED_KV}
OF_LARGE = OF_ALL | {Feature.VALUE_IS_KEY}
OF_EXPERTS = {Feature.EXPERTS, Feature.EXPERT_NORMS, Feature.EXPERT_SCALES, Feature.ROUTER_INPUT}


def hf(text: dict[str, Any], architecture: str = "Gemma4ForConditionalGeneration") -> ModelSpec:
    return spec_of_hf({"architectures": [architecture], "text_config": text, "vision_config": {}})[1]


@pytest.mark.parametrize(
    ("text", "size", "asked"),
    [
        (E2B, 4_628_569_379, OF_SMALL),
        (E4B, 7_463_013_418, OF_SMALL),
        (A4B, 25_233_141_790, OF_LARGE | OF_EXPERTS),
        (DENSE, 30_697_345_340, OF_LARGE),
        (UNIFIED, 11_907_350_320, OF_LARGE),
    ],
    ids=["E2B", "E4B", "26B-A4B", "31B", "12B"],
)
def test_the_published_models(text: dict[str, Any], size: int, asked: set[Feature]) -> None:
    architecture = f"Gemma4{'Unified' if text is UNIFIED else ''}ForConditionalGeneration"
    spec = hf(text, architecture)
    assert (parameters(spec), features(spec)) == (size, asked)
    alone = spec_of_hf({"model_type": f"gemma4{'_unified' if text is UNIFIED else ''}_text", **text})[1]
    assert replace(alone, architecture=architecture) == spec


def test_layers_of_e2b_read_the_last_of_their_kind() -> None:
    spec = hf(E2B)
    whole = Attention(8, 1, 512, head_norm=NORM, rope=WHOLE, scale=1.0, v_norm=Norm(1e-6))
    local = replace(whole, head_dim=256, rope=LOCAL, window=512)
    own = [*[local] * 4, whole] * 3
    shared = [replace(each, kv_from=13 if each.window else 14, v_norm=None) for each in (*[local] * 4, whole)]
    assert [layer.attention for layer in spec.layers] == own + shared * 4
    sizes = [FeedForward(6144, "gelu_tanh")] * 15 + [FeedForward(12288, "gelu_tanh")] * 20
    assert [layer.feed_forward for layer in spec.layers] == sizes
    assert (spec.embedding_scale, spec.logit_cap) == (1536**0.5, 30.0)


def test_26b_a4b_has_experts_beside_its_mlp() -> None:
    spec = hf(A4B)
    (feed,) = {layer.feed_forward for layer in spec.layers}
    assert isinstance(feed, Experts)
    assert (feed.count, feed.chosen, feed.router_scale) == (128, 8, 2816**-0.5)
    assert (feed.expert, feed.shared) == (FeedForward(704, "gelu_tanh"), FeedForward(2112, "gelu_tanh"))
    whole = spec.layers[5].attention
    assert (whole.heads, whole.kv_heads, whole.head_dim, whole.v_is_k) == (16, 2, 512, True)


def test_what_a_config_leaves_out() -> None:
    spec = spec_of_hf({"model_type": "gemma4_text"})[1]
    assert (len(spec.layers), spec.hidden_size, spec.max_positions) == (30, 2304, 131072)
    assert [layer.attention.window for layer in spec.layers] == ([512] * 5 + [None]) * 5
    assert (spec.layers[0].attention.rope, spec.layers[5].attention.rope) == (LOCAL, WHOLE)
    assert spec.layer_inputs is not None
    last = hf(E4B | {"layer_types": ["full_attention", *["sliding_attention"] * 41]}).layers[-1]
    assert (last.attention.window, last.attention.head_dim, last.attention.kv_from) == (None, 512, 0)
    by_layer = {key: value for key, value in DENSE.items() if "global" not in key}
    for digits in (1, 2, 3):  # transformers writes "05" where there are more than ten layers
        own = {f"{index:0{digits}}": {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
        assert hf(by_layer | {"per_layer_config": own}) == hf(DENSE)


@pytest.mark.parametrize("change", [{}, {"partial_rotary_factor": 1.0}, {"factor": 8.0}])
def test_rotations_are_those_of_transformers(change: dict[str, Any]) -> None:
    whole = {"rope_type": "proportional", "rope_theta": 7e4, "partial_rotary_factor": 0.5} | change
    ropes = {
        "full_attention": whole,
        "sliding_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
    }
    config = tiny_gemma4(rope_parameters=ropes)
    rotary, spec = Gemma4TextRotaryEmbedding(config), spec_of_hf(config.to_dict())[1]
    for index, kind in ((0, "sliding_attention"), (2, "full_attention")):
        attention = spec.layers[index].attention
        assert attention.rope is not None
        ours = inverse_frequencies(attention.rope, attention.head_dim, 64, 256)
        torch.testing.assert_close(ours, getattr(rotary, f"{kind}_inv_freq"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation silu"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"layer_types": ["linear_attention"] * 35}, "linear_attention"),
        ({"num_kv_shared_layers": 32}, "no layer without a window has any"),
        ({"num_kv_shared_layers": 35}, "of 35 layers share"),
        ({"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input"),
        ({"per_layer_config": {"3": {"hidden_size": 4}}}, "changes hidden_size"),
        ({"global_head_dim": 511}, "odd"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"rope_parameters": {"full_attention": {"rope_type": "axial"}}}, "'axial'"),
    ],
)
def test_what_cannot_be_run_is_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        hf(E2B | change)
    assert "\n" not in str(caught.value)


def logits(folder: Path, change: Any) -> torch.Tensor:
    """Return the logits of a checkpoint with a changed description."""
    network = load_model(files_of(folder), dtype=torch.float32, device=CPU)
    layers = network.layers
    spec = change(network.spec)
    if not spec.layers[0].scalar:
        layers = tuple(replace(layer, scalar=None) for layer in layers)
    return run(replace(network, spec=spec, layers=layers), TOKENS)


def mixed(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return `spec` with every mixture of experts changed."""
    return each_layer(
        spec,
        lambda _, layer: replace(layer, feed_forward=replace(layer.feed_forward, **changes)),  # type: ignore[type-var]
    )


LEFT_OUT = {
    "a norm of values": (tiny_gemma4, lambda s: each_attention(s, lambda _, a: replace(a, v_norm=None))),
    "a scale of 1": (tiny_gemma4, lambda s: each_attention(s, lambda _, a: replace(a, scale=None))),
    "a scalar": (tiny_gemma4, lambda s: each_layer(s, lambda _, layer: replace(layer, scalar=False))),
    "inputs of layers": (tiny_gemma4, lambda s: replace(s, layer_inputs=None)),
    "a norm of the router": (tiny_gemma4_moe, lambda s: mixed(s, router_norm=None)),
    "a scale of the router": (tiny_gemma4_moe, lambda s: mixed(s, router_scale=1.0)),
    "a norm before experts": (tiny_gemma4_moe, lambda s: mixed(s, expert_norm=None)),
    "a norm after experts": (tiny_gemma4_moe, lambda s: mixed(s, expert_post_norm=None)),
    "a norm before the MLP": (tiny_gemma4_moe, lambda s: mixed(s, shared_norm=None)),
    "a norm after the MLP": (tiny_gemma4_moe, lambda s: mixed(s, shared_post_norm=None)),
}


@pytest.mark.parametrize(("config", "change"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_leaving_a_part_out_would_be_seen(config: Any, change: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config())
    whole = logits(folder, lambda spec: spec)
    assert (logits(folder, change) - whole).abs().max() > 1e-2 * whole.abs().max()


def test_keys_and_values_of_layers_that_share_are_not_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_gemma4())
    expected = logits(folder, lambda spec: spec)
    tensors = load_file(folder / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        name = f"self_attn.{part}.weight"
        tensors[f"model.layers.4.{name}"] = tensors[f"model.layers.1.{name}"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(folder, lambda spec: spec), expected)


def test_only_the_text_part_is_read(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma4Config(
        text_config=tiny_gemma4(pad_token_id=0).to_dict(),
        vision_config=vision | {"num_key_value_heads": 1, "head_dim": 16},
    )
    model = random_model(config)
    model.save_pretrained(tmp_path)
    network = load_model(files_of(tmp_path), dtype=torch.float32, device=CPU)
    assert network.spec.architecture == "Gemma4ForConditionalGeneration"
    ours, expected = run(network, TOKENS), run_reference(model, TOKENS)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_a_gguf_file_without_what_is_optional(tmp_path: Path) -> None:
    metadata = {**GGUF["gemma4 moe"], "gemma4.attention.head_count_kv": [2, 2, 1]}
    told = {"metadata": metadata, "rope_factors": [1.0] * 4 + [1e30] * 12}
    spec = load_spec(files_of(write_gguf(tmp_path / "m.gguf", random_model(tiny_gemma4_moe()), **told)))
    assert [layer.attention.v_is_k for layer in spec.layers] == [False, False, True]
    assert [layer.attention.kv_heads for layer in spec.layers] == [2, 2, 1]
    assert (spec.vocab_size, spec.layer_inputs, spec.logit_cap) == (VOCAB_SIZE, None, 5.0)
    for key, said in (
        ("attention.sliding_window_pattern", "sliding_window_pattern"),
        ("attention.value_length_swa", "value_length_swa"),
    ):
        wrong = metadata | {f"gemma4.{key}": 17}
        path = write_gguf(tmp_path / "wrong.gguf", random_model(tiny_gemma4_moe()), metadata=wrong)
        with pytest.raises(ModelError, match=said):
            load_spec(files_of(path))


def test_the_tokenizer_of_a_gguf_file() -> None:
    special = ["<pad>", "<eos>", "<bos>", "<turn|>", "<|channel>"]
    made = ["\n\n", "\u2581a", "ab", "\u2581ab"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", "\u2581", "a", "b", *made]
    kinds_of_tokens = [3, 3, 3, 3, 4, *[6] * 256, *[1] * 8]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds_of_tokens,
        "tokenizer.ggml.merges": ["a b", "\u2581 ab", "\u2581 a"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }
    parts = parts_from_gguf(metadata)
    assert parts.text_start == "<bos>"
    tokenizer = Tokenizer(parts)
    said = {
        text: [tokens[i] for i in tokenizer.encode(text)]
        for text in ("ab ab\n\nb", "\u00e9 <turn|>", "<|channel>a")
    }
    assert said["ab ab\n\nb"] == ["ab", "\u2581ab", "\n\n", "b"]
    assert said["\u00e9 <turn|>"] == ["<0xC3>", "<0xA9>", "\u2581", "<turn|>"]
    assert said["<|channel>a"] == ["<|channel>", "a"]
    for text in ("ab ab\n\nb", "  \u00e9\n\n\na  b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {1, 3} <= set(tokenizer.stop_ids)
