"""The layers of Qwen3.5 and Qwen3-Next as llama.cpp's converter writes them to GGUF files."""

from typing import Any

import gguf
import torch
from torch import Tensor

ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
"""The GGUF architectures, by model_type."""


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the metadata of delta nets, of the attention between them, and of experts."""
    dims = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(dims)
    writer.add_rope_dimension_sections([dims // 4, dims // 8, dims // 8, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(4)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def converted(name: str, weight: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """Return a tensor of transformers under the names that the gguf package's tables know, and with its numbers."""
    stem = name.rpartition("linear_attn.")[0] + "linear_attn."
    part = name.removeprefix(stem)
    if stem == "linear_attn." or part == name:
        return [(name, weight)]
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, value_dim = keys * config.linear_key_head_dim, config.linear_value_head_dim
    if part == "A_log":
        name, weight = f"{stem}A_log", -weight.exp()
    if part == "dt_bias":
        name = f"{stem}dt_proj.bias"
    if part == "in_proj_qkvz.weight":
        own = weight.view(keys, -1, weight.shape[-1])
        each = config.linear_key_head_dim, config.linear_key_head_dim, values // keys * value_dim
        *qkv, z = (rows.flatten(0, 1) for rows in own.split((*each, each[-1]), 1))
        return [(f"{stem}in_proj_qkv.weight", torch.cat(qkv)), (f"{stem}in_proj_z.weight", z)]
    if config.model_type == "qwen3_next":
        return [(name, weight)]

    def tiled(given: Tensor, dim: int) -> Tensor:
        """Put the value heads that read key head 0 not side by side, but one for each key head in turn."""
        return given.view(keys, values // keys, dim, *given.shape[1:]).transpose(0, 1).reshape(given.shape)

    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        weight = tiled(weight, 1)
    if part == "in_proj_z.weight":
        weight = tiled(weight, value_dim)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        weight = torch.cat((weight[: 2 * size], tiled(weight[2 * size :], value_dim)))
    if part == "out_proj.weight":
        weight = tiled(weight.T.contiguous(), value_dim).T
    return [(name, weight)]
