"""Small quantised checkpoints, written digit by digit as AutoAWQ, GPTQModel, compressed-tensors and DeepSeek do, and
the numbers that their weights stand for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.checkpoints import random_model, tiny_llama

Tensors = dict[str, Tensor]
CONFIG = tiny_llama(
    hidden_size=256,
    intermediate_size=384,
    num_attention_heads=4,
    num_hidden_layers=2,
    tie_word_embeddings=False,
)
"""Its matrices are not square and not all of the same shape: 256 and 384 columns, 128 to 384 rows."""


@dataclass
class Digits:
    """A matrix [rows, columns] in groups, and the numbers that it stands for."""

    digits: Tensor
    """int64, not negative"""
    scales: Tensor
    """[rows, groups] in the dtype in which they are stored"""
    zeros: Tensor
    """int64 [rows, groups]"""
    group_of: Tensor
    """int64 [columns]"""

    @property
    def numbers(self) -> Tensor:
        digits = self.digits - self.zeros[:, self.group_of]
        return (digits.double() * self.scales.double()[:, self.group_of]).float()


def in_groups(
    weight: Tensor,
    bits: int,
    width: int | None,
    symmetric: bool,
    dtype: torch.dtype = torch.float16,
    shuffle: bool = False,
) -> Digits:
    rows, columns = weight.shape
    width = width or columns
    group_of = torch.arange(columns) // width
    if shuffle:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    most = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(group_of.max()) + 1):
        part = weight[:, group_of == group]
        if symmetric:
            scales.append(part.abs().amax(1) / (2 ** (bits - 1) - 1))
            zeros.append(torch.full((rows,), 2 ** (bits - 1)))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / most)
            zeros.append((-low / scales[-1]).round().long().clamp(0, most))
    scale, zero = torch.stack(scales, 1).to(dtype), torch.stack(zeros, 1)
    digits = (weight / scale.float()[:, group_of]).round().long() + zero[:, group_of]
    return Digits(digits.clamp(0, most), scale, zero, group_of)


def words(digits: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, ceil(m bits / 32)]: digit `order[i]` of a word at bit i * bits"""
    count = 32 // bits
    cut = torch.nn.functional.pad(digits, (0, -digits.shape[1] % count)).view(len(digits), -1, count)
    out = torch.zeros(cut.shape[:2], dtype=torch.int64)
    for place in range(count):
        out |= cut[:, :, place if order is None else order[place]] << place * bits
    return torch.where(out >= 2**31, out - 2**32, out).int()


def awq(weight: Tensor, width: int | None = 128) -> tuple[Tensors, Tensor]:
    found = in_groups(weight, 4, width, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(found.digits.T, 4, order),
        "qzeros": words(found.zeros.T, 4, order),
        "scales": found.scales.T,
    }
    return tensors, found.numbers


def gptq(
    weight: Tensor, bits: int, width: int | None, symmetric: bool, version: int, act_order: bool = False
) -> tuple[Tensors, Tensor]:
    found = in_groups(weight, bits, width, symmetric, shuffle=act_order)
    zeros = words(found.zeros.T, bits)
    if version == 1:  # GPTQModel subtracts from whole words
        zeros = zeros - sum(1 << shift for shift in range(0, 32, bits))
    tensors = {
        "qweight": words(found.digits, bits).T,
        "qzeros": zeros,
        "scales": found.scales.T,
        "g_idx": found.group_of.int(),
    }
    return tensors, found.numbers


def pack_quantized(
    weight: Tensor, bits: int, width: int | None, symmetric: bool, act_order: bool = False
) -> tuple[Tensors, Tensor]:
    found = in_groups(weight, bits, width, symmetric, torch.bfloat16, act_order)
    tensors = {
        "weight_packed": words(found.digits, bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(found.zeros.T, bits).T
    if act_order:
        tensors["weight_g_idx"] = found.group_of.int()
    return tensors, found.numbers


def int_quantized(weight: Tensor, symmetric: bool = True) -> tuple[Tensors, Tensor]:
    found = in_groups(weight, 8, None, symmetric, torch.bfloat16)
    tensors = {"weight": (found.digits - 128).to(torch.int8), "weight_scale": found.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return tensors, found.numbers


def fp8(weight: Tensor, high: int | None, wide: int | None, name: str) -> tuple[Tensors, Tensor]:
    """Quantise with a scale for every `high` rows and `wide` columns (None: all)."""
    rows, columns = weight.shape
    high, wide = high or rows, wide or columns
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    digits, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[at].abs().max() / 448
            digits[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[at] = digits[at].float() * scales[i, j]
    stored = scales.view(()) if scales.numel() == 1 else scales
    return {"weight": digits, name: stored}, numbers


def compressed(weights: Mapping[str, Any], stored: str, **more: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None} | more
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _gptq(bits: int, width: int | None, symmetric: bool, version: int, act_order: bool = False) -> "Case":
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": width or -1,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    held = None if act_order or (bits == 8 and not symmetric) else _held(bits, symmetric)
    return Case(config, lambda w: gptq(w, bits, width, symmetric, version, act_order), held)


def _packed(bits: int, width: int | None, symmetric: bool, act_order: bool = False) -> "Case":
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if width is None else "group",
        "group_size": width,
        "actorder": "group" if act_order else None,
    }
    held = None if act_order or (bits == 8 and not symmetric) else _held(bits, symmetric)
    return Case(
        compressed(weights, "pack-quantized"),
        lambda w: pack_quantized(w, bits, width, symmetric, act_order),
        held,
    )


def _held(bits: int, symmetric: bool) -> str:
    return "Q8_0" if bits == 8 else "Q4_0" if symmetric else "Q4_1"


def _fp8(high: int | None, wide: int | None, name: str, config: dict[str, Any]) -> "Case":
    return Case(config, lambda w: fp8(w, high, wide, name), None, {"input_scale": torch.tensor(0.5)})


@dataclass
class Case:
    """A way of quantising."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], tuple[Tensors, Tensor]]
    held: str | None
    """The blocks in which a CPU holds it."""
    beside: Tensors = field(default_factory=dict)
    """Further tensors beside every matrix, which must be ignored."""


_W8A8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}

CASES: dict[str, Case] = {
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        awq,
        "Q4_1",
    ),
    "awq, rows": Case(
        {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"},
        lambda w: awq(w, None),
        "Q4_1",
    ),
    **{
        f"gptq{version}, {bits} bits{', asymmetric' * (not sym)}": _gptq(bits, 64, sym, version)
        for version in (1, 2)
        for bits in (4, 8)
        for sym in (True, False)
    },
    "gptq, rows": _gptq(4, None, True, 1),
    "gptq, act-order": _gptq(4, 64, True, 1, act_order=True),
    "gptq, 8 bits, act-order, asymmetric": _gptq(8, 128, False, 2, act_order=True),
    **{
        f"packed, {bits} bits, {width}{', asymmetric' * (not sym)}": _packed(bits, width, sym)
        for bits, width, sym in (
            (4, 32, True),
            (4, None, True),
            (4, 128, False),
            (8, 64, True),
            (8, None, False),
        )
    },
    "packed, act-order": _packed(4, 64, True, act_order=True),
    "w8a8": Case(compressed(_INT8, "int-quantized", input_activations=_W8A8), int_quantized, "Q8_0"),
    "int8, asymmetric": Case(
        compressed(_INT8 | {"symmetric": False}, "int-quantized"), lambda w: int_quantized(w, False), None
    ),
    "fp8, tensor": _fp8(None, None, "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8, rows": _fp8(
        1, None, "weight_scale", compressed(_FLOAT | {"strategy": "channel"}, "float-quantized")
    ),
    "fp8, blocks": _fp8(128, 128, "weight_scale_inv", _DEEPSEEK | {"weight_block_size": [128, 128]}),
    "fp8, uneven blocks": _fp8(96, 160, "weight_scale_inv", _DEEPSEEK | {"weight_block_size": [96, 160]}),
    "fp8, compressed blocks": _fp8(
        128,
        128,
        "weight_scale",
        compressed(_FLOAT | {"strategy": "block", "block_structure": [128, 128]}, "float-quantized"),
    ),
}
"""Every layout that is supported."""


def write(
    folder: Path, case: Case, change: Mapping[str, Tensor | None] | None = None, config: Any = CONFIG
) -> Any:
    """Write a quantised checkpoint to `folder`; return the transformers model with the numbers that it stands for.

    `change` replaces tensors, or leaves them out.
    """
    model = random_model(config)
    tensors = {}
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            matrices = _matrices(name, parameter)
            if not matrices:
                tensors[name] = parameter.clone()
            for stem, matrix in matrices.items():
                parts, numbers = case.quantize(matrix)
                tensors |= {f"{stem}.{key}": value.contiguous() for key, value in parts.items()}
                tensors |= {f"{stem}.{key}": value.clone() for key, value in case.beside.items()}
                matrix.copy_(numbers)
    tensors |= change or {}
    folder.mkdir(exist_ok=True, parents=True)
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    told = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "quantization_config": case.config,
    }
    (folder / "config.json").write_text(json.dumps(told, default=str))
    return model


def _matrices(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return the parts of a parameter that are quantised: views of it by the names under which they are stored."""
    stem = name.removesuffix(".weight")
    if ".experts." in name:
        at, part = stem.rsplit(".", 1)
        parts = part.replace("gate_up_proj", "gate_proj up_proj").split()
        return {
            f"{at}.{expert}.{each}": matrix
            for expert, rows in enumerate(parameter)
            for each, matrix in zip(parts, rows.chunk(len(parts)), strict=True)
        }
    return {stem: parameter} if stem.endswith(("_proj", "_proj_qkv", "_proj_qkvz", "_proj_z")) else {}
