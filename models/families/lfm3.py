"""LFM3: short convolutions, attention with a window or without, a gate for each head, norms before and after parts."""

from dataclasses import replace
from typing import Any, Literal

from models.errors import ModelError
from models.families.common import base_spec
from models.families.family import Family
from models.families.fields import Fields
from models.families.lfm2 import LFM2_NAMES, with_convolutions
from models.families.rope import rope_from_part
from models.spec import Layer, ModelSpec, each_layer

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
_CONVOLUTION, _LOCAL, _WHOLE = "conv", "sliding_attention", "full_attention"


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields, bias = fields.or_else(**_DEFAULTS), fields.flag("attention_bias")
    plain = {key: value for key, value in fields.raw.items() if "rope" not in key}
    plain["rms_norm_eps"] = fields.number("norm_eps", 1e-5)
    spec = base_spec(architecture, replace(fields, raw=plain), head_norm=True, qkv_bias=bias, out_bias=bias)
    kinds, window = _kinds(fields, len(spec.layers)), fields.integer("sliding_window", 256)
    parameters = fields.mapping("rope_parameters")
    beside = replace(fields, raw={"max_position_embeddings": spec.max_positions})
    ropes = {
        kind: replace(rope_from_part(parameters.mapping(kind), beside, spec.attention.head_dim), exact=True)
        for kind in {*kinds} - {_CONVOLUTION}
    }
    gate: Literal["heads"] | None = "heads" if fields.flag("use_attention_gate", True) else None
    is_normed = fields.flag("use_sandwich_norm", True)

    def changed(index: int, layer: Layer) -> Layer:
        kind, after = kinds[index], spec.final_norm if is_normed else None
        layer = replace(layer, attention_post_norm=after, feed_forward_post_norm=after)
        if kind == _CONVOLUTION:
            return layer
        seen = window if kind == _LOCAL and window < spec.max_positions else None
        return replace(layer, mixer=replace(layer.attention, rope=ropes[kind], window=seen, gate=gate))

    width = fields.integer("conv_L_cache", 7, limit=1024)
    convolutions = [kind == _CONVOLUTION for kind in kinds]
    return with_convolutions(each_layer(spec, changed), convolutions, width, fields.flag("conv_bias"))


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kind of each layer: that in layer_types, otherwise attention in every second layer but the first."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        period = (_LOCAL, _CONVOLUTION, _WHOLE, _CONVOLUTION)
        return [period[index % 4] if index else _CONVOLUTION for index in range(layers)]
    known = (_CONVOLUTION, _LOCAL, _WHOLE)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"layer_types in {fields.where} is {str(kinds)[:60]!r}; it must name {layers} layers, each of them "
            f"{', '.join(known[:2])} or {known[2]}."
        )
    return kinds


FAMILY = Family(
    architectures=("Lfm3ForCausalLM",),
    model_types=("lfm3",),
    from_hf=_from_hf,
    names={
        **LFM2_NAMES,
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "attention_gate": "self_attn.gate_proj",
        "out": "self_attn.o_proj",
        "attention_post_norm": "post_operator_norm",
        "feed_forward_post_norm": "post_ffn_norm",
    },
    # transformers reads both names, and writes gate_proj.
    rename=lambda name: name.replace(".self_attn.g_proj.", ".self_attn.gate_proj."),
)
