"""What a family of models is: how its configs are read, and what its checkpoints call their tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.families.fields import Fields
from models.spec import ModelSpec
from models.weights.slots import Names, Packed

NAMES: Names = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
    "router": "mlp.gate",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}
"""What most checkpoints in Hugging Face layout call their tensors."""

GGUF_NAMES: Names = {
    "embedding": "token_embd",
    "layers": "blk.{}.",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "feed_forward_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "final_norm": "output_norm",
    "head": "output",
    "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate.{}",
    "experts.up": "ffn_up.{}",
    "experts.down": "ffn_down.{}",
}
"""The same for GGUF files."""

PACKED: Packed = {
    "mlp.experts.gate_up_proj": ("experts.gate", "experts.up"),
    "mlp.experts.down_proj": ("experts.down",),
}
"""Experts as transformers 5 stores them; before, each was a tensor of its own."""

GGUF_PACKED: Packed = {f"ffn_{part}_exps.{{field}}": (f"experts.{part}",) for part in ("gate", "up", "down")}
"""Experts in GGUF files."""


@dataclass(frozen=True, slots=True)
class GGUFConfig:
    """What a GGUF file tells of its network."""

    fields: Fields
    tensors: Mapping[str, Any]
    """By name; only which there are counts."""
    rope_factors: tuple[float, ...] | None = None
    """The values of rope_freqs.weight, or of rope_factors_short.weight."""
    long_factors: tuple[float, ...] | None = None
    """Those of rope_factors_long.weight."""


@dataclass(frozen=True, slots=True)
class Family:
    """One way of writing configs and checkpoints."""

    architectures: tuple[str, ...]
    """As config.json names them."""
    model_types: tuple[str, ...]
    """The same under model_type, in the same order: what a config without architectures means."""
    from_hf: Callable[[str, Fields], ModelSpec]
    """(architecture, config.json) -> spec. Raises ModelError for what is missing or cannot be run."""
    gguf_architecture: str | None = None
    """As general.architecture names it; None: not read from GGUF files."""
    from_gguf: Callable[[GGUFConfig], ModelSpec] | None = None
    names: Names = field(default_factory=lambda: NAMES)
    gguf_names: Names = field(default_factory=lambda: GGUF_NAMES)
    packed: Packed = field(default_factory=lambda: PACKED)
    gguf_packed: Packed = field(default_factory=lambda: GGUF_PACKED)
    rename: Callable[[str], str | None] = str
    """A tensor's name in a checkpoint -> the one to go by; None: not a part of this network."""
    turned: tuple[str, ...] = ()
    """Parts whose weights checkpoints, but not GGUF files, store [columns, rows]."""
    alternating: tuple[str, ...] = ()
    """Parts whose rows alternate in the tensor that holds them all, in checkpoints but not in GGUF files."""
    gguf_norm_offset: float = 0.0
    """What GGUF files have added to the weights of norms."""
    gguf_interleaved: tuple[str, ...] = ()
    """Parts whose GGUF rows interleave the two halves of every head, for another form of RoPE."""
