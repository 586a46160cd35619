"""Small random checkpoints, written by transformers and gguf, and a plain attention to run them with."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from models.files import ModelFiles
from models.network import Network
from models.recurrences import Recurrence
from models.reference.attention import Walk
from models.reference.decoder import Decoder
from tests.models import gguf_delta_nets

VOCAB_SIZE = 160


def tiny_qwen3(**changes: Any) -> Qwen3Config:
    """Return a config with three layers, GQA 4/2, and a head size other than hidden_size / heads."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    return Qwen3Config(**(values | changes))


def tiny_llama(**changes: Any) -> LlamaConfig:
    """Return a config with three layers, GQA 6/2, untied."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return LlamaConfig(**(values | changes))


_NEAR_1 = (
    "correct_output_scale",
    "ln_1.weight",
    "ln_2.weight",
    "ln_f.weight",
    "router.scale",
    "per_expert_scale",
)
"""What parameters other than norms are near 1."""
_OFFSET_NORMS = (
    *("gemma2", "gemma3", "gemma3_text"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
)
"""Types of models that store the difference of norms from 1."""


def random_model(config: PretrainedConfig, *, seed: int = 0, k_norm: float | None = None) -> Any:
    """Return a transformers model in fp32 whose weights are large enough for every part to matter.

    `k_norm` plants this value in some k_norm weights of every layer (Qwen3).
    """
    torch.manual_seed(seed)
    kind = _auto_class(config)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(_NEAR_1):
                parameter.uniform_(0.5, 1.5)
                if config.model_type in _OFFSET_NORMS:
                    parameter -= 1.0
            elif config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                parameter.normal_(0.0, 0.5)  # so that the activation is clamped
            elif name.endswith("e_score_correction_bias"):
                parameter.normal_(0.0, 0.1)
            elif name.endswith((".bias", "_bias")):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
            if k_norm is not None and name.endswith("k_norm.weight"):
                parameter[:: max(1, len(parameter) // 4)] = k_norm
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "gate.e_score_correction_bias")):
                buffer.normal_(0.0, 0.1)
    return model


def _auto_class(config: PretrainedConfig) -> Any:
    """Return what makes a transformers model; those of some types have no class for text alone."""
    return AutoModelForImageTextToText if config.model_type == "muse_glimmer" else AutoModelForCausalLM


def write_checkpoint(
    folder: Path,
    config: PretrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    k_norm: float | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write random weights with transformers, in Hugging Face layout (no tokenizer); return the folder."""
    model = random_model(config, seed=seed, k_norm=k_norm).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the transformers model of a folder. (`.to(dtype)` instead would round its RoPE frequencies, too.)"""
    kind = _auto_class(AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def files_of(path: Path) -> ModelFiles:
    """Return the ModelFiles of a folder or of a .gguf file."""
    return ModelFiles(path.name, gguf=path) if path.suffix == ".gguf" else ModelFiles(path.name, folder=path)


class PlainAttention:
    """Causal attention of one sequence, as `network` specifies it, with softmax in fp32; keeps k and v of every layer.

    `seen` bool [rows, rows] further limits which rows a row may see; a window counts only those that it does see.
    """

    def __init__(self, network: Network | None = None, seen: Tensor | None = None) -> None:
        self.network = network
        self.seen = seen
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer, sinks = None, None
        if self.network is not None:
            layer = self.network.spec.layers[layer_index].attention
            sinks = self.network.layers[layer_index].attention.sinks if layer.sinks else None
        if layer is not None and layer.kv_from is not None:
            k, v = self.kv[layer.kv_from]
        elif layer_index in self.kv:
            old_k, old_v = self.kv[layer_index]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.kv[layer_index] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if layer is None else layer.softmax_scale
        scores = torch.matmul(q.transpose(0, 1), keys.transpose(1, 2)) * scale
        if layer is not None and layer.score_cap is not None:
            scores = torch.tanh(scores / layer.score_cap) * layer.score_cap
        rows, columns = torch.arange(len(k) - len(q), len(k)).unsqueeze(1), torch.arange(len(k))
        seen = columns <= rows
        if self.seen is not None:
            seen &= self.seen[rows, columns]
        if layer is not None and layer.window is not None:
            seen &= seen.flip(1).cumsum(1).flip(1) <= layer.window
        if layer is not None and layer.chunk is not None:
            own = seen.sum(1, keepdim=True) - 1
            seen &= seen.cumsum(1) - 1 >= own // layer.chunk * layer.chunk
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
            weights = torch.cat((scores.float(), column), dim=-1).softmax(-1)[..., :-1].to(q.dtype)
        else:
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, values).transpose(0, 1)

    def last_rows(self, layer_index: int, x: Tensor, width: int) -> list[Tensor]:
        """See `models.reference.attention.ConvolutionRows`; the rows before a row are those that it sees."""
        kept = torch.cat((self.kv[layer_index][0], x)) if layer_index in self.kv else x
        self.kv[layer_index] = kept, kept
        seen = torch.ones(len(kept), len(kept)).tril().bool()
        if self.seen is not None:
            seen &= self.seen[: len(kept), : len(kept)]
        found = []
        for row in range(len(kept) - len(x), len(kept)):
            last = kept[seen[row]][-width:]
            found.append(F.pad(last, (0, 0, width - len(last), 0)))
        return list(torch.stack(found, dim=1))

    def latent_rows(self, layer_index: int, rows: Tensor) -> Iterable[tuple[int, Tensor]]:
        """See `models.reference.attention.LatentRows`; with `seen`, each row is as if it were a sequence's last."""
        kept = torch.cat((self.kv[layer_index][0], rows)) if layer_index in self.kv else rows
        self.kv[layer_index] = kept, kept
        if self.seen is None:
            return [(len(rows), kept)]
        seen = torch.ones(len(kept), len(kept)).tril().bool() & self.seen[: len(kept), : len(kept)]
        return [(1, kept[seen[row]]) for row in range(len(kept) - len(rows), len(kept))]

    def recur(self, layer_index: int, rows: Tensor, walk: Walk) -> Tensor:
        """See `models.reference.attention.RecurrentRows`; with `seen`, each row is walked to from the first it sees."""
        assert self.network is not None
        spec = self.network.spec.layers[layer_index].mixer
        assert isinstance(spec, Recurrence)
        before = spec.conv_width - 1
        if layer_index not in self.kv:
            self.kv[layer_index] = rows.new_zeros(before, spec.log_size), torch.zeros(spec.state_shape)
        earlier, state = self.kv[layer_index]
        kept = torch.cat((earlier, rows))
        if self.seen is None:
            out, state = walk(kept, state)
            self.kv[layer_index] = kept[len(rows) :], state
            return out
        self.kv[layer_index] = kept, state
        text, outs = kept[before:], []
        seen = torch.ones(len(text), len(text)).tril().bool() & self.seen[: len(text), : len(text)]
        states = {(): state}
        for row in range(len(text) - len(rows), len(text)):
            path = tuple(seen[row].nonzero().flatten().tolist())
            known = next(count for count in range(len(path) - 1, -1, -1) if path[:count] in states)
            read = torch.cat((kept[:before], text[[*path]]))[known:]
            out, states[path] = walk(read, states[path[:known]])
            outs.append(out[-1])
        return torch.stack(outs)


def run(
    given: Network | Decoder, token_ids: list[int], attention: PlainAttention | None = None, start: int = 0
) -> Tensor:
    """Return the logits [T, vocab] of our network for one sequence; the attention holds its first `start` tokens."""
    model = Decoder(given) if isinstance(given, Network) else given
    with torch.inference_mode():
        positions = torch.arange(start, start + len(token_ids))
        hidden = model.forward(torch.tensor(token_ids), positions, attention or PlainAttention(model.network))
        return model.logits(hidden)


def tensors_in(part: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a network, or of a part of it, by its path: "layers.0.attention.qkv.bias"."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, tuple | dict):
        for index, item in part.items() if isinstance(part, dict) else enumerate(part):
            yield from tensors_in(item, f"{name}.{index}")
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_in(getattr(part, field.name), f"{name}.{field.name}".removeprefix("."))


def run_reference(model: Any, token_ids: list[int]) -> Tensor:
    """Return the logits [T, vocab] of a transformers model for one sequence."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


_GGUF_ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "ministral": "llama",
    "ministral3": "mistral3",
    "mistral": "llama",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo3": "olmo2",
    "granitemoehybrid": "granitehybrid",
    "qwen3_moe": "qwen3moe",
    **gguf_delta_nets.ARCHITECTURES,
}
"""GGUF architectures that differ from the model_type."""
_INTERLEAVED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid")
_NAMES_OF_GRANITE = {
    "block_sparse_moe.experts": "mlp.experts",
    "router": "router.layer",
    "shared_mlp.input_linear": "mlp.shared_experts.gate_up_proj",
}


_SCALES_OF_GEMMA = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}


def _gguf_tensors(model: Any, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names from the gguf package's own tables, and numbers, as llama.cpp's converter writes them."""
    config, number = model.config, {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".act_fn." in name:  # Apertus: they are metadata
            continue
        weight = parameter.float()
        if stacked := re.fullmatch(
            r"(model\.altup_(?:unembed_)?projections)\.(\d)\.weight", name
        ):  # Gemma 3n
            if int(stacked[2]):
                continue
            name = f"{stacked[1]}.weight"
            weight = torch.stack([each.weight.detach().float() for each in model.get_submodule(stacked[1])])
        if arch in ("granitemoe", "granitehybrid"):  # whose converter uses names of other families
            for own, other in _NAMES_OF_GRANITE.items():
                name = name.replace(own, other)
            if not config.num_local_experts:
                name = name.replace("shared_experts.", "").replace(
                    "shared_mlp.output_linear", "mlp.down_proj"
                )
        if arch.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.", 1).replace("mixer.experts", "mlp.experts")
            name = name.replace("backbone", "model") if ".mlp." in name else name
        if ".linear_attn." not in name and (part := name.rpartition(".")[2]) in ("A_log", "D"):
            target = table.get_name(name)
            assert target is not None
            yield target, (-weight.exp() if part == "A_log" else weight).unsqueeze(1).numpy()
            continue
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = config.n_groups if arch.startswith("nemotron_h") else config.mamba_n_groups
            yield f"blk.{name.split('.')[2]}.ssm_norm.weight", weight.view(groups, -1).numpy()
            continue
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):  # GPT-2
            weight = weight.T
        if arch == "gpt-oss" and ".experts." in name:
            stored = _experts_of_gpt_oss(name, weight)
        elif (part := name.rpartition(".router.")[2]) in _SCALES_OF_GEMMA:
            yield f"blk.{name.split('.')[2]}.{_SCALES_OF_GEMMA[part]}.scale", weight.numpy()
            continue
        elif (
            name.endswith("kv_b_proj.weight") and config.model_type != "deepseek_v2"
        ):  # as older files have it
            by_head = weight.view(config.num_attention_heads, -1, weight.shape[1])
            keys, values = by_head.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            stored = [
                (name.replace("kv_b", "k_b"), keys.transpose(1, 2)),
                (name.replace("kv_b", "v_b"), values),
            ]
        elif (
            "experts.gate_up_proj" in name or (arch == "granitehybrid" and "gate_up_proj" in name)
        ) and arch != "gemma4":
            if arch == "llama4":
                weight = weight.transpose(1, 2)
            parts = zip(("gate_proj", "up_proj"), weight.chunk(2, dim=-2), strict=True)
            stored = [(name.replace("gate_up_proj", part), half) for part, half in parts]
        elif ".linear_attn." in name:
            stored = [
                (key, value.squeeze()) for key, value in gguf_delta_nets.converted(name, weight, config)
            ]
        else:
            key = name.replace(
                "gate.moe_statics.e_score_correction_bias", "moe_statics.e_score_correction.bias"
            )
            key = key.replace("expert_bias", "expert_bias.bias").replace("dt_bias", "dt_proj.bias")
            key = key.replace("gate.e_score_correction_bias", "gate.e_score_correction.bias")
            if arch == "llama4" and ".experts." in name:
                weight = weight.transpose(1, 2)
            stored = [(key, weight if weight.numel() == 1 else weight.squeeze())]
        for key, value in stored:
            target = table.get_name(key, try_suffixes=(".weight", ".bias"))
            assert target is not None, key
            target += "" if target.endswith((".weight", ".bias", ".ssm_a")) else ".weight"
            yield target, np.ascontiguousarray(value.numpy())


def _experts_of_gpt_oss(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Return the parts [experts, rows, columns], or biases [experts, rows], of weights that transformers transposes."""
    stem, field = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
    if weight.ndim == 3:
        weight = weight.transpose(1, 2)
    if not stem.endswith("gate_up_proj"):
        return [(stem + field, weight)]
    return [
        (stem.replace("gate_up", part) + field, weight[:, first::2])
        for first, part in enumerate(("gate", "up"))
    ]


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put q and k rows in the order of Llama's GGUF files: the two halves of each head, interleaved."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


RANDOM = {
    Kind.Q4_0: {0: 1 / 60},
    Kind.Q4_1: {0: 1 / 60, 2: -1 / 8},
    Kind.Q8_0: {0: 1 / 900},
    Kind.Q2_K: {80: 1 / 300, 82: 1 / 400},
    Kind.Q3_K: {108: 1 / 900},
    Kind.Q4_K: {0: 1 / 4000, 2: 1 / 500},
    Kind.Q5_K: {0: 1 / 8000, 2: 1 / 500},
    Kind.Q6_K: {208: 1 / 16000},
    Kind.IQ4_NL: {0: 1 / 700},
    Kind.IQ4_XS: {0: 1 / 12000},
    Kind.MXFP4: {},
}
"""Where the blocks of a type have fp16 scales, and values of these for numbers of about 0.1."""


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> Any:
    """Return blocks of random digits with sane scales, uint8 [rows, bytes per row]."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    for at, scale in RANDOM[kind].items():
        scales = (scale * rng.uniform(0.5, 1.5, data.shape[:2])).astype("<f2")
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == Kind.MXFP4:
        data[..., 0] = rng.integers(121, 125, data.shape[:2])
    return data.reshape(rows, -1)


def write_gguf(
    path: Path,
    model: Any,
    quantization: Kind | Mapping[str, Kind] = Kind.F32,
    *,
    rope_factors: list[float] | None = None,
    long_factors: list[float] | None = None,
    metadata: dict[str, Any] | None = None,
    most_tensors: int = 0,
) -> Path:
    """Write a transformers model as GGUF, under the names of the gguf package's tables; return the path.

    Matrices are of the type `quantization`, or of the one it gives for their GGUF name (`attn_q`). Types that the
    gguf package cannot quantise become random blocks. With `most_tensors` it is written in parts of that many tensors.
    """
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # or Gemma 4 tells no sizes that differ by layer
    arch = _GGUF_ARCHITECTURES.get(config.model_type, config.model_type)
    if arch == "nemotron_h" and "moe" in config.layer_types:
        arch = "nemotron_h_moe"
    is_hybrid = arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe")
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=most_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        dense = model.model.layers[0].feed_forward.w1 if arch.startswith("lfm2") else None
        size = getattr(config, "intermediate_size_mlp", getattr(config, "intermediate_size", None))
        if size is not None:
            writer.add_feed_forward_length(size if dense is None else dense.out_features)
        is_single = arch == "deepseek2" and config.model_type != "deepseek_v2"
        kv_heads = 1 if is_single else config.num_key_value_heads
        differ = dense is not None or is_hybrid
        without = ("conv", "linear_attention", "moe", "mlp")
        writer.add_head_count_kv(
            [kv_heads * (kind not in without) for kind in config.layer_types] if differ else kv_heads
        )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if config.model_type == "deepseek_v2":
            lengths = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        elif arch == "deepseek2":
            lengths = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
        else:
            lengths = head_dim, head_dim
        writer.add_key_length(lengths[0])
        writer.add_value_length(lengths[1])
        if arch == "cohere2":
            writer.add_layer_norm_eps(config.layer_norm_eps)
        elif arch.startswith("nemotron_h"):
            writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        else:
            writer.add_layer_norm_rms_eps(config.rms_norm_eps if dense is None else config.norm_eps)
        rotated = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4, "rope_type": "default"}
        rope = rotated.get("full_attention", rotated)
        writer.add_rope_freq_base(rope["rope_theta"] * rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2)))
        if arch == "gemma3" and rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "apertus":
        curves = [layer.mlp.act_fn for layer in model.model.layers]
        writer.add_xielu_alpha_p([curve.alpha_p.item() for curve in curves])
        writer.add_xielu_alpha_n([curve.alpha_n.item() for curve in curves])
        writer.add_xielu_beta([curve.beta.item() for curve in curves])
        writer.add_xielu_eps([curve.eps.item() for curve in curves])
    if arch == "ernie4_5-moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if is_hybrid:
        is_granite = arch == "granitehybrid"
        heads = config.mamba_n_heads if is_granite else config.mamba_num_heads
        writer.add_ssm_conv_kernel(config.mamba_d_conv if is_granite else config.conv_kernel)
        writer.add_ssm_state_size(config.mamba_d_state if is_granite else config.ssm_state_size)
        writer.add_ssm_group_count(config.mamba_n_groups if is_granite else config.n_groups)
        writer.add_ssm_inner_size(heads * (config.mamba_d_head if is_granite else config.mamba_head_dim))
        writer.add_ssm_time_step_rank(heads)
    if arch == "granitehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if arch == "nemotron_h_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
    if arch in ("granitemoe", "granitehybrid") and config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "shared_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if arch == "gpt-oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if arch == "lfm2moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "llama4":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if arch == "deepseek2":
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.model_type != "deepseek_v2":
            writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
            writer.add_value_length_mla(config.v_head_dim)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type in gguf_delta_nets.ARCHITECTURES:
        gguf_delta_nets.add_metadata(writer, config)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    for key, value in (metadata or {}).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    for target, weight in _gguf_tensors(model, arch):
        stem = target.split(".")[-2]
        if arch in _INTERLEAVED and stem in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
            weight = _interleave(weight, heads)
        if config.model_type in _OFFSET_NORMS and stem.endswith("norm") and stem != "ssm_norm":
            weight = weight + 1
        wanted = quantization if isinstance(quantization, Kind) else quantization.get(stem, Kind.F32)
        if weight.ndim == 1 or target.endswith(".bias") or wanted == Kind.F32:
            writer.add_tensor(target, weight)
        elif "_K" in wanted.name or wanted.name.startswith("IQ"):
            blocks = random_blocks(wanted, weight.size // weight.shape[-1], weight.shape[-1], len(target))
            writer.add_tensor(target, blocks.reshape(*weight.shape[:-1], -1), raw_dtype=wanted)
        else:
            writer.add_tensor(target, gguf.quantize(weight, wanted), raw_dtype=wanted)
    short = "rope_freqs" if long_factors is None else "rope_factors_short"
    for name, factors in ((short, rope_factors), ("rope_factors_long", long_factors)):
        if factors is not None:
            writer.add_tensor(f"{name}.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
