"""Apertus: an ungated feed-forward with xIELU, whose two parameters are learned for each layer, and normed heads."""

from dataclasses import replace
from math import isfinite

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_parameters
from models.spec import XIELU_BETA, FeedForward, ModelSpec, each_layer

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The rotation of a config without any."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    activation, bias = str(fields.raw.get("hidden_act", "xielu")), fields.flag("attention_bias")
    if activation != "xielu":
        raise ModelError(
            f"hidden_act {activation[:60]} in {fields.where} is not supported; supported: xielu."
        )
    if not rope_parameters(fields).raw:
        fields = replace(fields, raw={**fields.raw, "rope_parameters": _ROPE})
    fields = fields.or_else(rms_norm_eps=1e-5, rope_theta=_ROPE["rope_theta"])
    raw = {key: value for key, value in fields.raw.items() if key != "hidden_act"}
    spec = base_spec(architecture, replace(fields, raw=raw), head_norm=True, qkv_bias=bias, out_bias=bias)
    return _curved(spec, [None] * len(spec.layers))


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    spec = base_spec_of_gguf("ApertusForCausalLM", "apertus", config, head_norm=True)
    p, n, beta = (_by_layer(config.fields, f"xielu.{name}", spec) for name in ("alpha_p", "alpha_n", "beta"))
    if set(beta) != {XIELU_BETA}:
        raise ModelError(f"xielu.beta in {config.fields.where} is not {XIELU_BETA}, which is not supported.")
    return _curved(spec, list(zip(p, n, strict=True)))


def _by_layer(fields: Fields, key: str, spec: ModelSpec) -> list[float]:
    """Return a number for each layer, from a list or from one number for all. Raises ModelError."""
    value = fields.raw.get(key)
    found = value if isinstance(value, list) else [value] * len(spec.layers)
    if len(found) != len(spec.layers) or not all(isinstance(x, int | float) and isfinite(x) for x in found):
        raise ModelError(f"{key} in {fields.where} is {str(value)[:60]}; it must be a number for each layer.")
    return [float(x) for x in found]


def _curved(spec: ModelSpec, alphas: list[tuple[float, float]] | list[None]) -> ModelSpec:
    """Return `spec` with xIELU in every layer."""
    return each_layer(
        spec,
        lambda i, layer: replace(
            layer,
            feed_forward=FeedForward(layer.feed_forward.size, "xielu", gated=False, alphas=alphas[i]),
        ),
    )


FAMILY = Family(
    architectures=("ApertusForCausalLM",),
    model_types=("apertus",),
    from_hf=_from_hf,
    gguf_architecture="apertus",
    from_gguf=_from_gguf,
    names={
        **NAMES,
        "attention_norm": "attention_layernorm",
        "feed_forward_norm": "feedforward_layernorm",
        "alpha_p": "mlp.act_fn.alpha_p",
        "alpha_n": "mlp.act_fn.alpha_n",
    },
    # Its constants are tensors of some checkpoints.
    rename=lambda name: None if name.endswith((".act_fn.beta", ".act_fn.eps")) else name,
)
