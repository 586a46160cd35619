"""Unsupported features that an unknown architecture requires, as far as its config tells."""

from collections.abc import Mapping
from typing import Any

_ASKED: tuple[tuple[str, frozenset[str]], ...] = (
    ("multi-head latent attention", frozenset({"kv_lora_rank", "q_lora_rank", "attention.kv_lora_rank"})),
    ("experts that are chosen in groups", frozenset({"topk_group", "expert_group_used_count"})),
    ("sparse attention by an index", frozenset({"index_topk", "attention.indexer.top_k"})),
    (
        "state-space layers",
        frozenset({"ssm_state_size", "state_size", "mamba_d_state", "d_state", "ssm_cfg", "ssm.state_size"}),
    ),
    ("linear attention", frozenset({"linear_num_value_heads", "linear_attn_config", "lightning_attn"})),
    ("recurrent layers", frozenset({"lru_width", "rescale_every", "head_size_divisor", "wkv.head_size"})),
    ("convolutions between rows", frozenset({"conv_L_cache", "shortconv.l_cache"})),
    (
        "embeddings for every layer",
        frozenset({"hidden_size_per_layer_input", "embedding_length_per_layer_input"}),
    ),
    ("attention beside the feed-forward", frozenset({"parallel_attn", "use_parallel_residual"})),
    ("ALiBi positions", frozenset({"alibi", "use_alibi", "attention.max_alibi_bias"})),
    ("an encoder", frozenset({"is_encoder_decoder", "type_vocab_size", "tokenizer.ggml.token_type_count"})),
    ("images", frozenset({"vision_config", "vision_tower", "mm_vision_tower"})),
    ("sound", frozenset({"audio_config"})),
)
"""Words for the user, and the fields of config.json or of a GGUF file that mean this feature."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def missing_features(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the features that `config` requires and nothing here computes; `prefix` precedes GGUF field names."""
    asked = {name.removeprefix(prefix) for name, value in config.items() if _says(value)}
    found = [words for words, names in _ASKED if names & asked]
    kinds = config.get("layer_types")
    others = {k for k in kinds if isinstance(k, str)} - _LAYER_TYPES if isinstance(kinds, list) else set()
    return found + [f"layers of the kind {kind[:40]}" for kind in sorted(others)[:3]]


def unknown(what: str, name: object, missing: list[str], supported: str) -> str:
    """Return one line for an architecture that no family describes; `what` is the kind of name."""
    *most, last = missing or [""]
    words = f"{', '.join(most)} and {last}" if most else last
    why = f"chatterm does not compute {words}" if missing else "chatterm does not know it"
    return f"The {what} {str(name)[:60]} is not supported: {why}; supported: {supported}."


def _says(value: Any) -> bool:
    return value not in (None, False, 0, 0.0, "", [], {})
