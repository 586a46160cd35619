"""Muse Glimmer, text only: gates for the attention's output, norms without weights, layers without rotation."""

from dataclasses import replace
from typing import Any

from models.errors import ModelError
from models.families.common import base_spec, text_name
from models.families.family import NAMES, Family
from models.families.fields import Fields
from models.families.windows import windows
from models.spec import Layer, ModelSpec, Norm, each_layer

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_PERIOD = 4
"""One layer in each period of this many, counted from the last, sees all tokens and is not rotated, where a config does
not say."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = fields.mapping("text_config").or_else(**_DEFAULTS)  # only its text model is run
    activation = fields.raw.get("hidden_activation")
    if activation not in (None, "silu"):
        raise ModelError(
            f"hidden_activation {str(activation)[:60]} in {fields.where} is not supported; supported: silu."
        )
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias)
    layers, attention = len(spec.layers), spec.attention
    usual = [(layers - 1 - index) % _PERIOD != 0 for index in range(layers)]
    window = fields.integer("sliding_window", 2048)
    spec = windows(spec, fields, window, usual)
    thetas = fields.raw.get("layer_rope_theta")
    rotated = (
        usual if thetas is None else [theta != 0 for theta in fields.by_layer("layer_rope_theta", layers)]
    )
    norm = Norm(spec.final_norm.eps, offset=1.0)
    after = replace(norm, eps=fields.number("post_norm_eps", 1e-8))
    heads = Norm(norm.eps, weighted=False)
    scale = fields.number("qk_scale_factor", 3.87) * attention.softmax_scale

    def changed(index: int, layer: Layer) -> Layer:
        rope = layer.attention.rope if rotated[index] else None
        mixer = replace(layer.attention, rope=rope, head_norm=heads, scale=scale, gate="numbers")
        return Layer(mixer, layer.feed_forward, norm, after, norm, after)

    return replace(
        each_layer(spec, changed),
        final_norm=Norm(norm.eps, rounds_last=True),
        embedding_norm=heads,
        logit_scale=fields.number("output_multiplier", 0.19611613513818404),
        logit_cap=fields.number("final_logit_softcapping", 20.0),
    )


FAMILY = Family(
    architectures=("MuseGlimmerForConditionalGeneration",),
    model_types=("muse_glimmer",),
    from_hf=_from_hf,
    names={
        **NAMES,
        "attention_gate": "self_attn.gate_proj",
        "feed_forward_norm": "pre_feedforward_layernorm",
    },
    rename=text_name,
)
