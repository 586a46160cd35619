"""Tiny configs of families with every quirk turned on; longer than their windows and their original positions."""

from typing import Any

from transformers import Qwen2Config

from tests.models.checkpoints import tiny_llama

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 6.0, 12.0],
}


def tiny(config: type[Any], **changes: Any) -> Any:
    """`tiny_llama` as another kind of config; what is None in `changes` is left out."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rope_parameters")
    values = tiny_llama().to_dict()
    return config(**({key: values[key] for key in (*kept, *more)} | {"pad_token_id": None} | changes))


FAMILIES: dict[str, Any] = {
    "qwen2": tiny(Qwen2Config),
    "qwen2 windows": tiny(Qwen2Config, use_sliding_window=True, sliding_window=12, max_window_layers=1),
}

GGUF: dict[str, dict[str, Any]] = {
    "qwen2 windows": {
        "qwen2.attention.sliding_window": 12,
        "qwen2.attention.sliding_window_pattern": [False, True, True],
    },
}
"""What the metadata of a GGUF file tells of some of them, besides their sizes."""
GGUF_FACTORS: dict[str, dict[str, Any]] = {}
"""The same of the divisors of rotary frequencies, which are tensors."""
