"""The networks against transformers, on checkpoints that transformers wrote."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    ApertusConfig,
    Cohere2Config,
    Exaone4Config,
    Gemma3Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    SeedOssConfig,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from models.errors import ModelError
from models.families.registry import spec_of_hf
from models.loading.load import fill_network, load_model
from models.loading.plan import Target, plan_tensors, read_tensors
from models.network import ExpertWeights, NormWeights
from models.reference.decoder import Decoder
from models.reference.norms import apply_norm
from models.reference.products import _native_linear, _upcast_linear, choose_product
from models.reference.rope import rotary_table
from models.spec import Experts, FeedForward, ModelSpec, Norm
from models.weights.staging import Staging
from tests.models.checkpoints import (
    VOCAB_SIZE,
    PlainAttention,
    files_of,
    random_model,
    reference_model,
    run,
    run_reference,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
)
from tests.models.families import (
    FAMILIES,
    GRANITE,
    LONGROPE,
    MINISTRAL3,
    PLAINER,
    RECURRENT,
    YARN,
    tiny,
    tiny_deepseek,
    tiny_deepseek_v2,
    tiny_ernie,
    tiny_ernie_moe,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gemma3n,
    tiny_gemma4,
    tiny_gemma4_moe,
    tiny_gemma4_unified,
    tiny_glm_lite,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_granite4,
    tiny_granite_moe,
    tiny_lfm2,
    tiny_lfm2_moe,
    tiny_lfm3,
    tiny_llama4,
    tiny_muse_glimmer,
    tiny_qwen3_moe,
)

CPU = torch.device("cpu")
TOKENS = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}

CONFIGS = {
    "qwen3 tied": tiny_qwen3(),
    "qwen3 untied": tiny_qwen3(tie_word_embeddings=False),
    "qwen3 bias": tiny_qwen3(attention_bias=True),
    "qwen3 linear": tiny_qwen3(rope_parameters=LINEAR),
    "llama untied": tiny_llama(),
    "llama tied": tiny_llama(tie_word_embeddings=True),
    "llama biases": tiny_llama(attention_bias=True, mlp_bias=True),
    "llama multi-head": tiny_llama(num_key_value_heads=6),
    "llama head_dim": tiny_llama(head_dim=32),
    "llama eps": tiny_llama(rms_norm_eps=0.1),
    "llama llama3": tiny_llama(rope_parameters=LLAMA3),
    "llama linear": tiny_llama(rope_parameters=LINEAR),
    "llama dynamic": tiny_llama(rope_parameters=DYNAMIC),
    "llama yarn": tiny_llama(rope_parameters=YARN),
    **FAMILIES,
    **RECURRENT,
    "qwen3 moe renormalised": tiny_qwen3_moe(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1]),
    "gemma2 plain": tiny_gemma2(
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window=512,
        query_pre_attn_scalar=16,
    ),
    "gemma3 biases": tiny_gemma3(attention_bias=True, sliding_window_pattern=2, final_logit_softcapping=5.0),
    "gpt2 scales": tiny_gpt2(
        scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False,
        activation_function="gelu",
        n_inner=80,
        tie_word_embeddings=False,
        layer_norm_epsilon=0.1,
    ),
    "ernie biases": tiny_ernie(use_bias=True, tie_word_embeddings=False, rope_parameters=LINEAR),
    "ernie moe everywhere": tiny_ernie_moe(
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_interval=1,
        moe_layer_end_index=-1,
    ),
    "mistral": MistralConfig(**tiny_llama().to_dict() | {"sliding_window": None, "model_type": "mistral"}),
}


def assert_logits_close(ours: Tensor, expected: Tensor) -> None:
    """Assert that logits agree within 1e-4 of the largest logit of each position."""
    assert ours.shape == expected.shape
    scale = expected.abs().amax(dim=-1, keepdim=True)
    assert ((ours - expected).abs() / scale).max().item() < 1e-4


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_fp32_logits_are_those_of_transformers(config: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config)
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU)
    assert_logits_close(run(model, TOKENS), run_reference(reference_model(folder), TOKENS))


def without(folder: Path, change: Any) -> Tensor:
    """Return the logits of a checkpoint with a changed description."""
    network = load_model(files_of(folder), dtype=torch.float32, device=CPU)
    spec = change(network.spec)
    if not spec.learned_positions:
        network = replace(network, position_embedding=None)
    return run(replace(network, spec=spec), TOKENS)


def mixed(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return `spec` with every mixture of experts changed."""
    return replace(
        spec,
        layers=tuple(
            replace(layer, feed_forward=replace(layer.feed_forward, **changes))
            if isinstance(layer.feed_forward, Experts)
            else layer
            for layer in spec.layers
        ),
    )


def attending(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return `spec` with the attention of every layer changed."""
    return replace(
        spec,
        layers=tuple(replace(layer, mixer=replace(layer.attention, **changes)) for layer in spec.layers),
    )


LEFT_OUT = {
    "weights that do not add up to 1": ("qwen3 moe", lambda spec: mixed(spec, renormalise=True)),
    "weights that add up to 1": ("qwen3 moe renormalised", lambda spec: mixed(spec, renormalise=False)),
    "a window": ("gemma2", lambda spec: attending(spec, window=None)),
    "a window by one": ("gemma3", lambda spec: attending(spec, window=8)),
    "a cap of scores": ("gemma2", lambda spec: attending(spec, score_cap=None)),
    "a scale of scores": ("gemma3", lambda spec: attending(spec, scale=None)),
    "a cap of logits": ("gemma2", lambda spec: replace(spec, logit_cap=None)),
    "a scale of embeddings": ("gemma3", lambda spec: replace(spec, embedding_scale=1.0)),
    "an offset of norms": ("gemma2", lambda spec: replace(spec, final_norm=Norm(spec.final_norm.eps))),
    "a norm after": (
        "gemma3",
        lambda spec: replace(spec, layers=tuple(replace(x, attention_post_norm=None) for x in spec.layers)),
    ),
    "the tanh of a GELU": (
        "gemma2",
        lambda spec: replace(
            spec, layers=tuple(replace(x, feed_forward=FeedForward(96, "silu")) for x in spec.layers)
        ),
    ),
    "positions": ("gpt2", lambda spec: replace(spec, learned_positions=False)),
    "a scale of each layer": ("gpt2 scales", lambda spec: attending(spec, scale=1.0)),
    "neighbours that are rotated": (
        "ernie",
        lambda spec: attending(spec, rope=replace(spec.attention.rope, interleaved=False)),
    ),
    "attention beside the feed-forward": (
        "cohere2",
        lambda spec: replace(spec, layers=tuple(replace(x, parallel=False) for x in spec.layers)),
    ),
    "a gate for the attention": ("muse glimmer", lambda spec: attending(spec, gate=None)),
    "norms without weights": ("muse glimmer", lambda spec: attending(spec, head_norm=None)),
    "a norm of the embeddings": ("muse glimmer", lambda spec: replace(spec, embedding_norm=None)),
    "residuals beside the attention": (
        "gemma3n",
        lambda spec: replace(spec, layers=tuple(replace(x, laurel=None) for x in spec.layers)),
    ),
    "weights of the inputs of experts": ("llama4", lambda spec: mixed(spec, scales_inputs=False)),
    "sinks": ("gpt-oss", lambda spec: attending(spec, sinks=False)),
    "an addition to up": (
        "gpt-oss",
        lambda spec: mixed(spec, expert=replace(spec.layers[0].feed_forward.expert, up_offset=0.0)),
    ),
    "experts of lower rank": ("qwen3 moe", lambda spec: mixed(spec, chosen=2)),
}


@pytest.mark.parametrize(("name", "change"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_leaving_a_part_out_would_be_seen(name: str, change: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    whole = without(folder, lambda spec: spec)
    assert (without(folder, change) - whole).abs().max() > 1e-2 * whole.abs().max()


def test_a_bias_chooses_experts_and_a_shared_one_is_added(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["ernie moe"])
    network = load_model(files_of(folder), dtype=torch.bfloat16, device=CPU)
    parts = network.layers[1].feed_forward
    assert isinstance(parts, ExpertWeights)
    assert parts.selection_bias is not None
    assert (parts.router.weight.dtype, parts.selection_bias.dtype) == (torch.float32, torch.float32)
    network = load_model(files_of(folder), dtype=torch.float32, device=CPU)
    whole = run(network, TOKENS)
    for field in ("selection_bias", "shared"):
        layers = tuple(
            replace(layer, feed_forward=replace(layer.feed_forward, **{field: None}))
            if isinstance(layer.feed_forward, ExpertWeights)
            else layer
            for layer in network.layers
        )
        spec = network.spec if field == "selection_bias" else mixed(network.spec, shared=None)
        changed = run(replace(network, layers=layers, spec=spec), TOKENS)
        assert (changed - whole).abs().max() > 1e-2 * whole.abs().max()


def test_experts_that_are_stored_in_one_tensor_are_the_same(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3 moe"])
    expected = without(folder, lambda spec: spec)
    tensors = random_model(CONFIGS["qwen3 moe"]).state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(without(folder, lambda spec: spec), expected)
    spec, stored, names, _ = read_tensors(files_of(folder))
    streamed = fill_network(
        plan_tensors(spec, stored, Target(torch.float32, CPU), names), staging=Staging(1024)
    )
    assert torch.equal(run(streamed, TOKENS), expected)
    name = "model.layers.1.mlp.experts.down_proj"
    down = tensors[name]
    for damaged in (down[:7], down.reshape(4, -1, down.shape[-1])):
        save_file(tensors | {name: damaged.clone()}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=re.escape(name)):
            load_model(files_of(folder), dtype=torch.float32, device=CPU)


def test_gpt2_checkpoints_of_old_are_the_same(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_gpt2())
    expected = without(folder, lambda spec: spec)
    tensors = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in random_model(tiny_gpt2()).state_dict().items()
        if name != "lm_head.weight"
    }
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(without(folder, lambda spec: spec), expected)


@pytest.mark.parametrize(
    "config",
    [tiny_gpt2(n_embd=64), tiny_qwen3_moe(hidden_size=64, moe_intermediate_size=64)],
    ids=["gpt2", "moe"],
)
def test_what_is_turned_or_cut_can_be_quantized(config: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config)
    expected = without(folder, lambda spec: spec)
    network = load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize="int8")
    assert network.is_quantized
    assert (run(network, TOKENS) - expected).norm() < 0.1 * expected.norm()


def test_the_text_part_of_a_gemma_that_sees_images(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(text_config=tiny_gemma3().to_dict(), vision_config=vision)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    network = load_model(files_of(tmp_path), dtype=torch.float32, device=CPU)
    assert_logits_close(run(network, TOKENS), run_reference(model, TOKENS))


@pytest.mark.parametrize(
    "text",
    [
        tiny(MistralConfig, head_dim=24, sliding_window=None),
        tiny(Ministral3Config, head_dim=24, rope_parameters=MINISTRAL3),
    ],
    ids=["mistral", "ministral3"],
)
def test_the_text_part_of_a_mistral_that_sees_images(text: Any, tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Mistral3Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    network = load_model(files_of(tmp_path), dtype=torch.float32, device=CPU)
    assert network.spec.architecture == "Mistral3ForConditionalGeneration"
    assert_logits_close(run(network, TOKENS), run_reference(model, TOKENS))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in list(tensors):  # the names that transformers 5 itself uses
        new = name.replace("language_model.model.", "model.language_model.")
        tensors[new.replace("language_model.lm_head", "lm_head")] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    newer = load_model(files_of(tmp_path), dtype=torch.float32, device=CPU)
    assert torch.equal(run(newer, TOKENS), run(network, TOKENS))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_deepseek())
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    expected = run(load_model(files_of(folder), dtype=torch.float32, device=CPU), TOKENS)
    extra = {
        "model.layers.3.eh_proj.weight": torch.zeros(4, 4),
        "model.layers.3.mlp.up_proj.weight": torch.ones(2),
    }
    save_file(tensors | extra, path)
    assert torch.equal(run(load_model(files_of(folder), dtype=torch.float32, device=CPU), TOKENS), expected)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(4, 4)}, path)
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj\.weight, which DeepseekV3ForCausalLM"):
        load_model(files_of(folder), dtype=torch.float32, device=CPU)


def test_what_differs_between_the_configs_reaches_the_logits(tmp_path: Path) -> None:
    # Validates the test above: with the same weights, each of these must change the result.
    plain = run_reference(random_model(tiny_llama()), TOKENS)
    ropes = [{"rope_parameters": rope} for rope in (LLAMA3, LINEAR, YARN)]
    for change in (*ropes, {"rms_norm_eps": 0.1}):
        changed = run_reference(random_model(tiny_llama(**change)), TOKENS)
        assert (changed - plain).abs().max() > 1e-2 * plain.abs().max()


@cache
def usual_logits(family: str) -> Tensor:
    return run_reference(random_model(FAMILIES[family]), TOKENS)


@pytest.mark.parametrize("name", PLAINER)
def test_what_is_unusual_about_a_family_reaches_the_logits(name: str) -> None:
    found = usual_logits(max((family for family in FAMILIES if name.startswith(family)), key=len))
    plain = run_reference(random_model(PLAINER[name]), TOKENS)
    assert (found - plain).abs().max() > 1e-2 * plain.abs().max()


BF16_CONFIGS = {
    "olmo2": (tiny(Olmo2Config, hidden_size=384, intermediate_size=768), None),
    "granite": (tiny(GraniteConfig, hidden_size=384, intermediate_size=768, **GRANITE), None),
    "granite moe": (tiny_granite_moe(hidden_size=384, intermediate_size=128), None),
    "phi3": (tiny(Phi3Config, hidden_size=384, intermediate_size=768, rope_parameters=HALF), None),
    "qwen3": (tiny_qwen3(hidden_size=256, intermediate_size=512, head_dim=64), None),
    "qwen3 k_norm 96.5": (tiny_qwen3(hidden_size=256, intermediate_size=512, head_dim=64), 96.5),
    "qwen2": (tiny(Qwen2Config, hidden_size=384, intermediate_size=768), None),
    "llama": (tiny_llama(hidden_size=384, intermediate_size=768), None),
    "gemma2": (tiny_gemma2(hidden_size=256, intermediate_size=512, head_dim=64), None),
    "gemma3": (tiny_gemma3(hidden_size=256, intermediate_size=512, head_dim=64), None),
    "gemma3n": (tiny_gemma3n(hidden_size=256, intermediate_size=512, head_dim=64), None),
    "gemma4": (tiny_gemma4(hidden_size=256, intermediate_size=512, head_dim=64), None),
    "gemma4 moe": (tiny_gemma4_moe(hidden_size=256, moe_intermediate_size=128, head_dim=64), None),
    "gemma4 unified": (tiny_gemma4_unified(hidden_size=256, intermediate_size=512, head_dim=64), None),
    "gpt2": (tiny_gpt2(n_embd=256), None),
    "ernie": (tiny_ernie(hidden_size=256, intermediate_size=512, head_dim=64), None),
    "ernie moe": (tiny_ernie_moe(hidden_size=256, moe_intermediate_size=128), None),
    "qwen3 moe": (tiny_qwen3_moe(hidden_size=256, moe_intermediate_size=128, head_dim=64), None),
    "gpt-oss": (tiny_gpt_oss(hidden_size=256, intermediate_size=128, head_dim=64), None),
    "exaone4": (tiny(Exaone4Config, hidden_size=384, intermediate_size=768, sliding_window=12), None),
    "seed oss": (tiny(SeedOssConfig, hidden_size=384, intermediate_size=768, head_dim=64), None),
    "ministral3": (
        tiny(
            Ministral3Config,
            hidden_size=384,
            intermediate_size=768,
            head_dim=64,
            rope_parameters=MINISTRAL3,
        ),
        None,
    ),
    "hunyuan": (tiny(HunYuanDenseV1Config, hidden_size=384, intermediate_size=768, head_dim=64), None),
    "cohere2": (tiny(Cohere2Config, hidden_size=384, intermediate_size=768, sliding_window=12), None),
    "apertus": (tiny(ApertusConfig, hidden_size=384, intermediate_size=768), None),
    "llama4": (tiny_llama4(hidden_size=384, intermediate_size=128, head_dim=64), None),
    "lfm2": (tiny_lfm2(hidden_size=384, intermediate_size=768), None),
    "lfm3": (tiny_lfm3(hidden_size=384, intermediate_size=768, head_dim=64), None),
    "lfm2 moe": (tiny_lfm2_moe(hidden_size=384, intermediate_size=768, moe_intermediate_size=128), None),
    "granite4": (tiny_granite4(hidden_size=384, shared_intermediate_size=768), None),
    "muse glimmer": (  # transformers rounds scaled queries, which a power of two does not change
        tiny_muse_glimmer(hidden_size=384, intermediate_size=768, head_dim=64, qk_scale_factor=4.0),
        None,
    ),
    "deepseek v2": (tiny_deepseek_v2(hidden_size=384, moe_intermediate_size=128, kv_lora_rank=128), None),
    "deepseek v3": (tiny_deepseek(hidden_size=384, moe_intermediate_size=128, kv_lora_rank=128), None),
    "glm4 moe lite": (tiny_glm_lite(hidden_size=384, moe_intermediate_size=128, kv_lora_rank=128), None),
}


ROUNDED_OTHERWISE = (
    *("gpt2", "qwen3_moe", "ernie4_5_moe", "gpt_oss", "granitemoe", "lfm2_moe"),
    *("cohere2", "gemma3n_text", "llama4_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)


@pytest.mark.parametrize(("config", "k_norm"), BF16_CONFIGS.values(), ids=BF16_CONFIGS.keys())
def test_bf16_is_no_further_from_fp32_than_transformers(
    config: Any, k_norm: float | None, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, config, dtype=torch.bfloat16, k_norm=k_norm)
    model = load_model(files_of(folder), dtype=torch.bfloat16, device=CPU)
    fp32, bf16 = reference_model(folder), reference_model(folder, torch.bfloat16)

    def errors(prompt: list[int]) -> tuple[Tensor, Tensor]:
        truth = run_reference(fp32, prompt)
        logits = run(model, prompt), run_reference(bf16, prompt)
        ours, theirs = ((x.float() - truth).norm(dim=-1) / truth.norm(dim=-1) for x in logits)
        return ours, theirs

    # Prompts so short that every machine uses the same products as transformers, so that rounding must match.
    # (Transformers computes experts in another order, GPT-2's products are not those of linear layers, and Command R's
    # cos and sin and Gemma 3n's 2 ** -0.5 are rounded there.)
    is_other = config.model_type in ROUNDED_OTHERWISE or getattr(config, "enable_moe_block", False)
    for start in () if is_other else (0, 24, 48):
        ours, theirs = errors(TOKENS[start : start + 12])
        assert ours.median() <= theirs.median()
        assert ours.max() <= theirs.max()
    # Longer prompts may use more exact products, whose errors scatter around those of transformers.
    ours, theirs = errors(TOKENS)
    assert ours.median() <= 1.2 * theirs.median()
    assert ours.max() <= 1.5 * theirs.max()


@pytest.mark.parametrize(
    "config",
    [tiny_qwen3(), tiny_llama(), *RECURRENT.values()],
    ids=["qwen3", "llama", *RECURRENT],
)
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(config: Any, tmp_path: Path) -> None:
    model = load_model(files_of(write_checkpoint(tmp_path, config)), dtype=torch.float32, device=CPU)
    attention = PlainAttention(model)
    pieces = [run(model, TOKENS[a:b], attention, start=a) for a, b in ((0, 20), (20, 21), (21, 22), (22, 60))]
    assert_logits_close(torch.cat(pieces), run(model, TOKENS))


def test_hidden_and_logits_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    model = load_model(files_of(write_checkpoint(tmp_path, tiny_qwen3())), dtype=torch.bfloat16, device=CPU)
    decoder = Decoder(model)
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(TOKENS), torch.arange(len(TOKENS)), PlainAttention())
        logits = decoder.logits(hidden[-2:])
    assert (hidden.shape, hidden.dtype) == ((60, 48), torch.bfloat16)
    assert (logits.shape, logits.dtype) == ((2, VOCAB_SIZE), torch.bfloat16)
    assert model.head.parts == (model.embedding,)


def test_attention_gets_normed_and_rotated_heads_of_every_layer(tmp_path: Path) -> None:
    model = load_model(files_of(write_checkpoint(tmp_path, tiny_qwen3())), dtype=torch.float32, device=CPU)
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def attention(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((layer_index, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return torch.zeros_like(q)

    with torch.inference_mode():
        Decoder(model).forward(torch.tensor([1, 2, 3]), torch.tensor([5, 0, 9]), attention)
    assert seen == [(layer, (3, 4, 16), (3, 2, 16), (3, 2, 16)) for layer in range(3)]


def test_positions_need_not_start_at_zero_or_be_in_order(tmp_path: Path) -> None:
    model = load_model(files_of(write_checkpoint(tmp_path, tiny_llama())), dtype=torch.float32, device=CPU)
    reference = random_model(tiny_llama())
    positions = torch.tensor([7, 3, 200, 8])
    with torch.inference_mode():
        decoder = Decoder(model)
        ours = decoder.logits(decoder.forward(torch.tensor([1, 2, 3, 4]), positions, PlainAttention()))
        # The mask is given, because transformers takes positions out of order for several packed sequences.
        hidden = torch.full((4, 4), float("-inf")).triu(1)[None, None]
        theirs = reference(torch.tensor([[1, 2, 3, 4]]), attention_mask=hidden, position_ids=positions[None])
    assert_logits_close(ours, theirs.logits[0])


@pytest.mark.parametrize("length", [64, 128, 200, 256])
def test_dynamic_rope_beyond_the_trained_length(length: int, tmp_path: Path) -> None:
    # A fixed table has theta scaled for its own length, at which it must agree with transformers.
    folder = write_checkpoint(tmp_path, tiny_llama(rope_parameters=DYNAMIC, max_position_embeddings=128))
    tokens = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU, context_length=length)
    assert model.positions == length
    assert_logits_close(run(model, tokens), run_reference(reference_model(folder), tokens))


@pytest.mark.parametrize(("context", "count"), [(32, 20), (32, 32), (64, 40), (256, 60)])
def test_longrope_is_chosen_by_the_context_a_network_is_made_for(
    context: int, count: int, tmp_path: Path
) -> None:
    # transformers decides by the length of the text: both agree if both are short or both are long.
    folder = write_checkpoint(tmp_path, FAMILIES["phi3 longrope"])
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU, context_length=context)
    reference = reference_model(folder)
    assert_logits_close(run(model, TOKENS[:count]), run_reference(reference, TOKENS[:count]))
    # The requested text length decides, too, and leaves the number of positions unchanged.
    asked = load_model(files_of(folder), dtype=torch.float32, device=CPU, longest=context)
    assert asked.positions == 256
    assert torch.equal(run(asked, TOKENS[:20]), run(model, TOKENS[:20]))
    other = load_model(files_of(folder), dtype=torch.float32, device=CPU, longest=288 - context)
    changed = run(other, TOKENS[:20]) - run(model, TOKENS[:20])
    assert (changed.abs().max() > 1e-2) == (context != 64)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    LLAMA3,
    LINEAR,
    DYNAMIC,
    YARN,
    YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "factor": 3.0},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
    YARN | {"partial_rotary_factor": 0.5, "factor": None},
    LONGROPE | {"partial_rotary_factor": 0.5},
    LONGROPE | {"partial_rotary_factor": 0.5, "factor": 4.0},
    LONGROPE | {"partial_rotary_factor": 0.5, "attention_factor": 1.5},
]


@pytest.mark.parametrize("length", [64, 65, 5000])
@pytest.mark.parametrize("rope", ROPES)
def test_the_rotary_table_is_computed_in_fp32_and_then_rounded(rope: dict[str, Any], length: int) -> None:
    # Below, just beyond and far beyond the original positions, cos and sin equal those of transformers to the bit.
    rope = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = 64
    config = tiny_llama(rope_parameters=rope, max_position_embeddings=4096)
    attention = spec_of_hf(config.to_dict())[1].attention
    assert attention.rope is not None
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), torch.arange(length)[None])
        table = rotary_table(attention.rope, attention.head_dim, length, 4096, dtype, CPU)
        half = attention.rotated // 2
        assert cos.shape[-1] == 2 * half
        assert torch.equal(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1))


def test_rms_norm_rounds_before_it_multiplies_by_the_weight() -> None:
    x, weight = (torch.randn(50, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(2))
    theirs = LlamaRMSNorm(64, 1e-6)
    theirs.weight = torch.nn.Parameter(weight[0] * 40, requires_grad=False)
    assert torch.equal(apply_norm(Norm(1e-6), NormWeights(theirs.weight), x), theirs(x))


@pytest.mark.parametrize("product", [_native_linear, _upcast_linear])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_every_cpu_product_is_a_linear_layer(product: Any, rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 96), (80, 96), (80,))
    )
    out = product(x, weight, bias if biased else None)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=0.05)
    assert torch._C._get_mkldnn_enabled()


def test_products_other_than_bf16_on_cpu_are_the_plain_one() -> None:
    assert choose_product(torch.float32, CPU) is torch.nn.functional.linear
    assert choose_product(torch.bfloat16, torch.device("cuda")) is torch.nn.functional.linear
    assert choose_product(torch.bfloat16, CPU) in (_native_linear, _upcast_linear)


class CountedOps(TorchDispatchMode):
    """Counts the torch operations that reach a kernel or make a view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("config", "limit"), [(tiny_llama, 42), (tiny_qwen3, 50)], ids=["llama", "qwen3"])
def test_a_layer_costs_few_operations(config: Any, limit: int, tmp_path: Path) -> None:
    # Decoding on a CPU pays some microseconds per operation; a stray cast or copy in every layer shows here.
    counts = []
    for layers in (1, 2):
        folder = write_checkpoint(tmp_path / str(layers), config(num_hidden_layers=layers))
        model = load_model(files_of(folder), dtype=torch.bfloat16, device=CPU)
        with CountedOps() as ops:
            Decoder(model).forward(torch.tensor([1]), torch.tensor([2]), lambda layer_index, q, k, v: q)
        counts.append(ops.count)
    assert counts[1] - counts[0] <= limit
