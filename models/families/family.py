"""The definition of a model family: how its configs are read, and how its checkpoints name their tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from models.families.fields import Fields
from models.spec import ModelSpec
from models.weights.slots import Names, Packed

if TYPE_CHECKING:
    from models.weights.tensor_mapping import (
        Changes,
    )  # brings torch, which a listing of models need not wait for

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
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "post_attention_layernorm",  # in networks that norm nothing after attention
    "feed_forward_post_norm": "post_feedforward_layernorm",
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
"""The tensor names of most checkpoints in Hugging Face layout."""

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
    "sinks": "attn_sinks.weight",
    "attention_post_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_post_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "final_norm": "output_norm",
    "head": "output",
    "router": "ffn_gate_inp",
    "selection_bias": "exp_probs_b.bias",
    "shared.gate": "ffn_gate_shexp",
    "shared.up": "ffn_up_shexp",
    "shared.down": "ffn_down_shexp",
    "experts.gate": "ffn_gate.{}",
    "experts.up": "ffn_up.{}",
    "experts.down": "ffn_down.{}",
}
"""The tensor names of most GGUF files."""

PACKED: Packed = {
    "mlp.experts.gate_up_proj": ("experts.gate", "experts.up"),
    "mlp.experts.down_proj": ("experts.down",),
}
"""Experts as transformers 5 stores them; earlier versions stored each as a tensor of its own."""

GGUF_PACKED: Packed = {f"ffn_{part}_exps.{{field}}": (f"experts.{part}",) for part in ("gate", "up", "down")}
"""Experts as GGUF files store them."""


@dataclass(frozen=True, slots=True)
class GGUFConfig:
    """The description of a network in a GGUF file."""

    fields: Fields
    tensors: Mapping[str, Any]
    """Tensors by name; only their presence matters."""
    rope_factors: tuple[float, ...] | None = None
    """The values of rope_freqs.weight or rope_factors_short.weight."""
    long_factors: tuple[float, ...] | None = None
    """The values of rope_factors_long.weight."""

    def with_fields(self, values: Mapping[str, Any]) -> "GGUFConfig":
        """Return the description with these values of fields."""
        return replace(self, fields=replace(self.fields, raw={**self.fields.raw, **values}))


@dataclass(frozen=True, slots=True)
class Family:
    """One way of writing configs and checkpoints."""

    architectures: tuple[str, ...]
    """The names in config.json."""
    model_types: tuple[str, ...]
    """The values of model_type for these architectures, in the same order; used for a config that names none."""
    from_hf: Callable[[str, Fields], ModelSpec]
    """(architecture, config.json) -> spec. Raises ModelError if something is missing or not supported."""
    gguf_architecture: str | None = None
    """The name in general.architecture; None: the family is not read from GGUF files."""
    from_gguf: Callable[[GGUFConfig], ModelSpec] | None = None
    names: Names = field(default_factory=lambda: NAMES)
    gguf_names: Names = field(default_factory=lambda: GGUF_NAMES)
    packed: Packed = field(default_factory=lambda: PACKED)
    gguf_packed: Packed = field(default_factory=lambda: GGUF_PACKED)
    rename: Callable[[str], str | None] = str
    """A tensor's name in a checkpoint -> the name to use; None: the tensor does not belong to this network."""
    turned: tuple[str, ...] = ()
    """Parts whose weights are stored [columns, rows], in checkpoints but not in GGUF files."""
    alternating: tuple[str, ...] = ()
    """Names in `packed` of tensors that hold some rows of each of their parts, then some more of each, and so on."""
    gguf_alternating: tuple[str, ...] = ()
    """The same of names in `gguf_packed`."""
    changes: "Changes" = field(default_factory=dict)
    """Parts that are stored otherwise in checkpoints, but not in GGUF files."""
    gguf_changes: "Changes" = field(default_factory=dict)
    """Parts that are stored otherwise in GGUF files."""
    gguf_interleaved: tuple[str, ...] = ()
    """Parts whose rows in GGUF files interleave the two halves of every head, for another form of RoPE."""
