"""Qwen3.5 and Qwen3-Next against transformers, on checkpoints that transformers wrote."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from models.errors import ModelError
from models.families.registry import spec_of_hf
from models.loading.load import load_model
from models.network import Network
from models.recurrences import DeltaNet
from models.reference.decoder import Decoder
from models.spec import ModelSpec, each_attention, each_layer
from tests.covering import each_value_once
from tests.models import gguf_delta_nets
from tests.models.checkpoints import (
    VOCAB_SIZE,
    PlainAttention,
    files_of,
    random_model,
    reference_model,
    run,
    run_reference,
    write_checkpoint,
    write_gguf,
)
from tests.models.hybrids import HYBRIDS, tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next
from tests.models.quantized_models import CASES, write
from tests.models.test_networks import assert_logits_close

CPU = torch.device("cpu")
TOKENS = torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1)).tolist()
CUTS = (*range(1, 6), 16, 31, 32, 33, 62, 63, 64)
"""Within what a convolution sees, and around chunks."""


def loaded(folder: Path, **options: Any) -> Network:
    return load_model(files_of(folder), device=CPU, **({"dtype": torch.float32} | options))


@pytest.mark.parametrize("name", HYBRIDS)
def test_fp32_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, HYBRIDS[name])
    network, expected = loaded(folder), run_reference(reference_model(folder), TOKENS)
    assert_logits_close(run(network, TOKENS), expected)
    for cut in CUTS:
        backend, model = PlainAttention(network), Decoder(network)
        pieces = [run(model, TOKENS[:cut], backend), run(model, TOKENS[cut:], backend, cut)]
        assert_logits_close(torch.cat(pieces), expected)


def test_long_texts_are_computed_as_by_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_qwen3_5(max_position_embeddings=2048))
    tokens = torch.randint(VOCAB_SIZE, (2048,), generator=torch.Generator().manual_seed(2)).tolist()
    assert_logits_close(run(loaded(folder), tokens), run_reference(reference_model(folder), tokens))


def nets(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return `spec` with its delta nets changed."""
    return each_layer(
        spec,
        lambda _, layer: (
            replace(layer, mixer=replace(layer.mixer, **changes))
            if isinstance(layer.mixer, DeltaNet)
            else layer
        ),
    )


def attending(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return each_attention(spec, lambda _, attention: replace(attention, **changes))


LEFT_OUT = {
    "the order of value heads": lambda spec: nets(spec, alternating=True),
    "the epsilon of the gated norm": lambda spec: nets(spec, norm_eps=1.0),
    "the gate of the attention": lambda spec: attending(spec, gate=None),
    "the offset of norms": lambda spec: attending(spec, head_norm=replace(spec.final_norm, offset=0.0)),
    "the pairs that rotate": lambda spec: attending(
        spec, rope=replace(spec.attention.rope, interleaved=True)
    ),
}


@pytest.mark.parametrize("change", LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_leaving_a_part_out_would_be_seen(change: Any, tmp_path: Path) -> None:
    network = loaded(write_checkpoint(tmp_path, HYBRIDS["qwen3.5"]))
    whole, changed = run(network, TOKENS), run(replace(network, spec=change(network.spec)), TOKENS)
    assert (changed - whole).abs().max() > 1e-2 * whole.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_part_of_a_model_that_sees_pictures(tied: bool, tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 1, "out_hidden_size": 48}
    text = tiny_qwen3_5(tie_word_embeddings=tied).to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    model = Qwen3_5ForConditionalGeneration(config)
    text_model = random_model(tiny_qwen3_5(tie_word_embeddings=tied))
    model.model.language_model.load_state_dict(text_model.model.state_dict())
    model.lm_head.load_state_dict(text_model.lm_head.state_dict())
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.language_model.layers.") for name in tensors)
    assert any(name.startswith("model.visual.") for name in tensors)
    extra = {"mtp.fc.weight": torch.zeros(48, 96), "mtp.layers.0.input_layernorm.weight": torch.zeros(48)}
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    assert_logits_close(run(loaded(tmp_path), TOKENS), run_reference(text_model, TOKENS))


def test_a_model_may_be_held_in_16_bits_or_blocks(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, tiny_qwen3_5(hidden_size=64, linear_value_head_dim=32, intermediate_size=64)
    )
    expected = run(loaded(folder), TOKENS)
    network = loaded(folder, dtype=torch.bfloat16)
    net = network.layers[0].mixer
    assert (net.decay.dtype, net.dt_bias.dtype, net.filters.dtype) == (torch.float32,) * 2 + (torch.bfloat16,)
    assert (run(network, TOKENS).float() - expected).norm() < 0.1 * expected.norm()
    network = loaded(folder, quantize="int8")
    assert network.is_quantized
    assert network.layers[0].mixer.gates.is_plain
    assert not network.layers[0].mixer.inputs.is_plain
    assert (run(network, TOKENS) - expected).norm() < 0.1 * expected.norm()


CONFIG = tiny_qwen3_5().to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "no layer with attention"),
        ({"layer_types": ["mamba"] * 4}, "each of them linear_attention or full_attention"),
        ({"layer_types": ["full_attention"]}, "it must name 4 layers"),
        ({"linear_num_value_heads": 5}, "5 value heads for 2 key heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"attention_bias": True}, "attention_bias in config.json is true"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    assert spec_of_hf(json.loads(json.dumps(CONFIG)))[1].layers[0].mixer == DeltaNet(2, 6, 16, 24)
    with pytest.raises(ModelError, match=said):
        spec_of_hf(CONFIG | changes)


GGUF = {
    "qwen3.5": tiny_qwen3_5(layer_types=None),
    "qwen3.5 tied": tiny_qwen3_5(layer_types=None, tie_word_embeddings=True, linear_num_value_heads=2),
    "qwen3.5 moe": tiny_qwen3_5_moe(layer_types=None),
    "qwen3 next": tiny_qwen3_next(layer_types=None, mlp_only_layers=[], norm_topk_prob=True),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model = random_model(GGUF[name])
    path = write_gguf(tmp_path / "model.gguf", model)
    assert_logits_close(run(loaded(path, quantize="none"), TOKENS), run_reference(model, TOKENS))


def test_older_files_of_qwen3_next_hold_all_projections_in_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(GGUF["qwen3 next"])
    found = gguf_delta_nets.converted

    def older(name: str, weight: Tensor, config: Any) -> list[tuple[str, Tensor]]:
        return [(name, weight)] if "in_proj_qkvz" in name else found(name, weight, config)

    monkeypatch.setattr(gguf_delta_nets, "converted", older)
    path = write_gguf(tmp_path / "model.gguf", model)
    assert_logits_close(run(loaded(path, quantize="none"), TOKENS), run_reference(model, TOKENS))


def test_blocks_of_gguf_files_stay_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "linear_value_head_dim": 32, "intermediate_size": 64, "layer_types": None}
    model = random_model(tiny_qwen3_5(**sizes))
    stems = ("attn_q", "attn_qkv", "attn_gate", "ssm_alpha", "ssm_out")
    network = loaded(write_gguf(tmp_path / "model.gguf", model, dict.fromkeys(stems, Kind.Q8_0)))
    net, attention = network.layers[0].mixer, network.layers[3].attention
    assert net.gates.is_plain
    assert [part.rows for part in net.inputs.parts] == [32, 32, 192, 192]
    assert not any(part.is_plain for part in (*net.inputs.parts, *attention.gate.parts, *net.out.parts))
    expected = run_reference(model, TOKENS)
    assert (run(network, TOKENS) - expected).norm() < 0.1 * expected.norm()


def test_gguf_files_may_have_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    model = random_model(GGUF["qwen3.5"])
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "model.gguf", model, metadata=more)
    assert_logits_close(run(loaded(path, quantize="none"), TOKENS), run_reference(model, TOKENS))


@each_value_once
@pytest.mark.parametrize(
    "name", ["awq", "gptq, act-order", "fp8, blocks", "packed, act-order", "w8a8", "fp8, rows"]
)
@pytest.mark.parametrize("make", [tiny_qwen3_5, tiny_qwen3_next])
def test_heads_are_cut_out_of_quantised_checkpoints(
    make: Callable[..., PretrainedConfig], name: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "linear_num_value_heads": 4}
    more = {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "mlp_only_layers": [0, 1, 2, 3]}
    config = make(**(sizes | (more if make is tiny_qwen3_next else {**more, "mlp_only_layers": None})))
    expected = run_reference(write(tmp_path, CASES[name], config=config), TOKENS)
    assert_logits_close(run(loaded(tmp_path, quantize="none"), TOKENS), expected)
    ours = run(loaded(tmp_path, quantize="auto"), TOKENS)
    assert (ours - expected).norm() < 0.1 * expected.norm()
