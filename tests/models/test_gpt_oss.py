"""gpt-oss: experts in MXFP4, in safetensors as the makers store them, and in GGUF files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.errors import ModelError
from models.families.registry import spec_of_hf
from models.hub.inspect import describe
from models.loading.load import load_model
from models.network import ExpertWeights
from models.spec import Rope
from models.weights.block_formats import Kind as BlockKind
from models.weights.formats.blocks import dequantize
from models.weights.packing import unpack
from tests.models.checkpoints import files_of, random_model, run, run_reference, write_checkpoint, write_gguf
from tests.models.families import GGUF, tiny_gpt_oss
from tests.models.known_configs import GPT_OSS

CPU = torch.device("cpu")
TOKENS = list(range(3, 60))
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, columns, rows], as in transformers -> the digits and the scales as stored"""
    rows = weight.transpose(1, 2).contiguous()
    blocks = torch.from_numpy(gguf.quantize(rows.numpy(), Kind.MXFP4)).view(*rows.shape[:2], -1, 17)
    digits = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=-1)
    return digits[..., ::2] | digits[..., 1::2] << 4, blocks[..., 0].clone()


def write_quantized(folder: Path, change: Mapping[str, Tensor | None] | None = None, **config: Any) -> Path:
    """Write a checkpoint with experts stored like those of gpt-oss; `change` replaces tensors, or leaves them out."""
    write_checkpoint(folder, tiny_gpt_oss(**config))
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(tensors.pop(name))
    tensors |= change or {}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors"
    )
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": QUANTIZED}))
    return folder


def close(ours: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    return bool(((ours - expected).abs() / expected.abs().amax(-1, keepdim=True)).max() < tolerance)


def test_the_blocks_of_a_checkpoint_are_those_that_transformers_reads() -> None:
    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    digits, scales = packed(weight)
    theirs = convert_moe_packed_tensors(digits, scales, dtype=torch.float32)
    assert 0 < (theirs - weight).norm() < 0.2 * weight.norm()


def test_logits_of_quantized_experts_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path)
    plain = load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize="none")
    whole = Mxfp4Config(dequantize=True)  # without accelerate, transformers does nothing else on a CPU
    theirs = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=whole
    )
    expected = run_reference(theirs.eval(), TOKENS)
    assert close(run(plain, TOKENS), expected)
    notes: list[str] = []
    network = load_model(files_of(folder), dtype=torch.float32, device=CPU, on_note=notes.append)
    assert len(notes) == 1
    assert notes[0].startswith("The unquantised weights of this file take ")
    for layer, numbers in zip(network.layers, plain.layers, strict=True):
        experts, same = layer.feed_forward, numbers.feed_forward
        assert isinstance(experts, ExpertWeights)
        assert isinstance(same, ExpertWeights)
        for expert, own in zip(experts.experts, same.experts, strict=True):
            for linear, matrix in ((expert.gate_up, own.gate_up.weight), (expert.down, own.down.weight)):
                assert {part.format for part in linear.parts} == {BlockKind.MXFP4}
                out = torch.empty(linear.rows, linear.columns)
                dequantize(torch.cat([part.data for part in linear.parts]), BlockKind.MXFP4, out)
                assert torch.equal(out, matrix)
    # Tensors that were not quantised are held as Q8_0, with which some tokens choose other experts.
    errors = (run(network, TOKENS) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05


def test_experts_of_a_folder_are_packed_for_a_gpu_as_they_are(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path)
    notes: list[str] = []
    network = load_model(
        files_of(folder), dtype=torch.float32, device=CPU, packs=lambda spec: True, on_note=notes.append
    )
    plain = load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize="none")
    for ours, theirs in zip(network.layers, plain.layers, strict=True):
        assert isinstance(ours.feed_forward, ExpertWeights)
        assert isinstance(theirs.feed_forward, ExpertWeights)
        for expert, other in zip(ours.feed_forward.experts, theirs.feed_forward.experts, strict=True):
            for linear, whole in ((expert.gate_up, other.gate_up), (expert.down, other.down)):
                (part,) = linear.parts
                assert part.planes is not None
                found = unpack(part.planes, torch.arange(part.rows))
                assert torch.equal(found, whole.weight)
    assert not any("expanded" in note for note in notes), notes


def test_every_digit_and_scale_is_that_of_the_gguf_package() -> None:
    digits = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(255, dtype=torch.uint8)
    data = torch.cat(
        (scales.repeat_interleave(16).unsqueeze(1), digits.repeat(255, 1)), dim=1
    )  # each scale with all bytes
    out = torch.empty(len(data), 32)
    dequantize(data, BlockKind.MXFP4, out)
    with np.errstate(over="ignore"):
        assert torch.equal(out, torch.from_numpy(gguf.dequantize(data.numpy(), Kind.MXFP4)))


@pytest.mark.parametrize(
    "change",
    [
        {"model.layers.0.mlp.experts.down_proj_scales": None},
        {"model.layers.0.mlp.experts.down_proj_blocks": None},
        {"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(8, 64, 2, dtype=torch.uint8)},
        {"model.layers.0.mlp.experts.down_proj_scales": torch.ones(8, 64, 3)},
        {"model.layers.0.mlp.experts.down_proj_bias": torch.zeros(8, 32)},
        {"model.layers.0.mlp.experts.down_proj_bias": torch.tensor(0.0)},
        {"model.layers.1.mlp.experts.gate_up_proj_bias": torch.zeros(7, 192)},
    ],
)
def test_what_does_not_fit_together_is_named_in_one_line(
    change: Mapping[str, Tensor | None], tmp_path: Path
) -> None:
    folder = write_quantized(tmp_path, change)
    with pytest.raises(ModelError, match=r"experts\.(down|gate_up)_proj") as caught:
        load_model(files_of(folder), dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)


def test_other_ways_of_quantizing_are_refused() -> None:
    for config in ({"quant_method": "gptq"}, {"quant_method": "hqq"}, {}, "mxfp4"):
        with pytest.raises(ModelError, match=r"[Qq]uantised"):
            spec_of_hf(GPT_OSS | {"quantization_config": config})


def test_a_gguf_file_keeps_its_experts_in_mxfp4(tmp_path: Path) -> None:
    kinds = {f"ffn_{part}_exps": Kind.MXFP4 for part in ("gate", "up", "down")}
    attention = {f"attn_{part}": Kind.Q8_0 for part in ("q", "k", "v", "output")}
    path = write_gguf(
        tmp_path / "model.gguf",
        random_model(tiny_gpt_oss()),
        {**kinds, **attention, "token_embd": Kind.Q8_0, "output": Kind.Q8_0},
        metadata=GGUF["gpt-oss"],
    )
    network = load_model(files_of(path), dtype=torch.float32, device=CPU)
    layer = network.layers[0].feed_forward
    assert isinstance(layer, ExpertWeights)
    assert {part.format for part in (*layer.experts[3].gate_up.parts, *layer.experts[3].down.parts)} == {39}
    expected = run(load_model(files_of(path), dtype=torch.float32, device=CPU, quantize="none"), TOKENS)
    assert close(run(network, TOKENS), expected)
    assert describe(files_of(path)).is_quantized


def test_what_a_config_does_not_say_is_what_transformers_takes() -> None:
    told = ("architectures", "num_hidden_layers", "intermediate_size", "num_local_experts")
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    small = {key: GPT_OSS[key] for key in (*told, *sizes, "max_position_embeddings")}
    assert spec_of_hf(small)[1] == spec_of_hf(GPT_OSS | {"quantization_config": None})[1]
    plain = spec_of_hf(small | {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}})[1]
    assert plain.attention.rope == Rope(150_000.0)
    assert [layer.attention.window for layer in plain.layers[:3]] == [128, None, 128]


def test_facts_of_a_quantized_folder(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path)
    facts = describe(files_of(folder))
    whole = describe(files_of(write_checkpoint(tmp_path / "plain", tiny_gpt_oss())))
    assert facts.supported
    assert facts.parameters == whole.parameters
    assert facts.dtypes[0][0] == "MXFP4"
    assert facts.is_quantized
