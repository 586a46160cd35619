"""Apertus: an ungated feed-forward with xIELU, whose two parameters are learned for each layer, and normed heads."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_parameters
from models.spec import XIELU_BETA, FeedForward, Layer, ModelSpec, each_layer

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
    fields, layers = config.fields, len(spec.layers)
    p, n, beta = (fields.by_layer(f"xielu.{name}", layers) for name in ("alpha_p", "alpha_n", "beta"))
    if set(beta) != {XIELU_BETA}:
        raise ModelError(f"xielu.beta in {fields.where} is not {XIELU_BETA}, which is not supported.")
    return _curved(spec, list(zip(p, n, strict=True)))


def _curved(spec: ModelSpec, alphas: list[tuple[float, float]] | list[None]) -> ModelSpec:
    """Return `spec` with xIELU in every layer."""

    def curved(index: int, layer: Layer) -> Layer:
        assert isinstance(layer.feed_forward, FeedForward)
        feed = replace(layer.feed_forward, activation="xielu", gated=False, alphas=alphas[index])
        return replace(layer, feed_forward=feed)

    return each_layer(spec, curved)


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
