"""Tiny configs of networks with recurrent layers, with every quirk turned on."""

from typing import Any

from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from tests.models.checkpoints import VOCAB_SIZE

_QWEN3_5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
_SPARSE: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}


def tiny_qwen3_5(**changes: Any) -> Qwen3_5TextConfig:
    """Return four layers, three of them delta nets whose value heads share key heads."""
    return Qwen3_5TextConfig(**(_QWEN3_5 | {"intermediate_size": 96} | changes))


def tiny_qwen3_5_moe(**changes: Any) -> Qwen3_5MoeTextConfig:
    """Return the same with eight experts and a shared one in every layer."""
    return Qwen3_5MoeTextConfig(**(_QWEN3_5 | _SPARSE | changes))


def tiny_qwen3_next(**changes: Any) -> Qwen3NextConfig:
    """Return the same with a dense feed-forward in the first layer, and weights of experts that do not add up to 1."""
    given = _QWEN3_5 | _SPARSE | {"intermediate_size": 96, "mlp_only_layers": [0], "norm_topk_prob": False}
    return Qwen3NextConfig(**(given | changes))


HYBRIDS: dict[str, Any] = {
    "qwen3.5": tiny_qwen3_5(),
    "qwen3.5 usual": tiny_qwen3_5(layer_types=None, linear_num_value_heads=2, tie_word_embeddings=True),
    "qwen3.5 moe": tiny_qwen3_5_moe(),
    "qwen3 next": tiny_qwen3_next(),
}
