"""Gemma 2 and 3, text only: four norms per layer, stored as offsets, GeGLU, scaled embeddings, local layers."""

from dataclasses import replace
from functools import partial
from typing import Any

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf, text_name
from models.families.family import GGUF_NAMES, NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_from_hf, ropes_by_layer, unscaled_of_gguf
from models.spec import FeedForward, Layer, ModelSpec, Rope, each_layer

_WITH_IMAGES = "Gemma3ForConditionalGeneration"
_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
_ONLY_2 = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_ONLY_3 = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PERIOD_2, _PERIOD_3 = 2, 6
"""One layer in each period of this many sees all tokens."""
_LARGEST = (46, 62)
"""Layer counts of the 27B models: their scores are scaled by hidden_size / heads, which GGUF files do not mention."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    is_3 = architecture != "Gemma2ForCausalLM"
    if architecture == _WITH_IMAGES:  # only its text model is run
        tied = fields.flag("tie_word_embeddings", True)
        fields = _with(fields.mapping("text_config"), {"tie_word_embeddings": tied})
    fields = _with(fields, _DEFAULTS | (_ONLY_3 if is_3 else _ONLY_2))
    raw = fields.raw
    if raw["hidden_activation"] != "gelu_pytorch_tanh":
        raise ModelError(
            f"hidden_activation {str(raw['hidden_activation'])[:60]} in {fields.where} is not supported; supported: "
            "gelu_pytorch_tanh."
        )
    if raw.get("use_bidirectional_attention"):
        raise ModelError(f"{fields.where} requires attention to later tokens, which is not supported.")
    dim = fields.integer("head_dim")
    if is_3:
        whole, local = ropes_by_layer(
            fields,
            dim,
            fields.number("rope_theta", _GLOBAL_THETA),
            fields.number("rope_local_base_freq", _LOCAL_THETA),
        )
    else:
        whole = local = rope_from_hf(fields, dim)
    bias = fields.flag("attention_bias")
    plain = {key: value for key, value in raw.items() if key != "hidden_act" and "rope" not in key}
    spec = base_spec(architecture, replace(fields, raw=plain), head_norm=is_3, qkv_bias=bias, out_bias=bias)
    period = fields.integer("sliding_window_pattern", _PERIOD_3) if is_3 else _PERIOD_2
    return _gemma(
        spec,
        _global_layers(fields, len(spec.layers), period),
        window=None if raw["sliding_window"] is None else fields.integer("sliding_window"),
        ropes=(whole, local),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        score_cap=fields.number_or_none("attn_logit_softcapping") if not is_3 else None,
        logit_cap=fields.number_or_none("final_logit_softcapping"),
    )


def _from_gguf(config: GGUFConfig, name: str) -> ModelSpec:
    is_3, fields = name == "gemma3", config.fields
    spec = base_spec_of_gguf(f"Gemma{name[-1]}ForCausalLM", name, config, head_norm=is_3)
    attention, layers = spec.attention, len(spec.layers)
    assert attention.rope is not None
    window = fields.raw.get(f"{name}.attention.sliding_window", None if is_3 else _DEFAULTS["sliding_window"])
    period = _PERIOD_3 if is_3 else _PERIOD_2
    caps = {f"{name}.attn_logit_softcapping": 50.0, f"{name}.final_logit_softcapping": 30.0}
    score_cap, logit_cap = (_with(fields, {} if is_3 else caps).number_or_none(key) for key in caps)
    width = spec.hidden_size / attention.heads if layers in _LARGEST else attention.head_dim
    local = fields.number(f"{name}.rope.freq_base_swa", _LOCAL_THETA)
    return _gemma(
        spec,
        {i for i in range(layers) if (i + 1) % period == 0},
        window=None if window is None else fields.integer(f"{name}.attention.sliding_window", window),
        ropes=(attention.rope, unscaled_of_gguf(fields, name, local) if is_3 else attention.rope),
        scale=width**-0.5,
        score_cap=None if is_3 else score_cap,
        logit_cap=logit_cap,
    )


def _gemma(
    spec: ModelSpec,
    whole: set[int],
    *,
    window: int | None,
    ropes: tuple[Rope, Rope],
    scale: float,
    score_cap: float | None,
    logit_cap: float | None,
) -> ModelSpec:
    """Return `spec` with Gemma's common features; the layers in `whole` see all tokens and use the first of `ropes`."""
    norm = replace(spec.final_norm, offset=1.0)
    if window is not None and window >= spec.max_positions:
        window = None

    def layer(index: int, given: Layer) -> Layer:
        attention, feed = given.attention, given.feed_forward
        assert isinstance(feed, FeedForward)
        return Layer(
            replace(
                attention,
                head_norm=norm if attention.head_norm is not None else None,
                rope=ropes[index not in whole],
                window=None if index in whole else window,
                scale=None if scale == attention.head_dim**-0.5 else scale,
                score_cap=score_cap,
            ),
            replace(feed, activation="gelu_tanh"),
            *(norm,) * 4,
        )

    return replace(
        each_layer(spec, layer), final_norm=norm, embedding_scale=spec.hidden_size**0.5, logit_cap=logit_cap
    )


def _global_layers(fields: Fields, layers: int, period: int) -> set[int]:
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return {i for i in range(layers) if (i + 1) % period == 0}
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"layer_types in {fields.where} must name full_attention or sliding_attention for each of the "
            f"{layers} layers."
        )
    return {i for i, kind in enumerate(kinds) if kind == "full_attention"}


def _with(fields: Fields, defaults: dict[str, Any]) -> Fields:
    """Return the fields with defaults for missing ones; an explicit null remains."""
    return replace(fields, raw={**defaults, **fields.raw})


_NAMES = {**NAMES, "feed_forward_norm": "pre_feedforward_layernorm"}
_NO_OFFSETS = {part: (lambda stored: stored - 1.0) for part in GGUF_NAMES if part.endswith("norm")}
"""GGUF files add 1 to the weights of all norms."""


FAMILY_2 = Family(
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    from_hf=_from_hf,
    gguf_architecture="gemma2",
    from_gguf=partial(_from_gguf, name="gemma2"),
    names=_NAMES,
    gguf_changes=_NO_OFFSETS,
)
FAMILY_3 = Family(
    architectures=("Gemma3ForCausalLM", _WITH_IMAGES),
    model_types=("gemma3_text", "gemma3"),
    from_hf=_from_hf,
    gguf_architecture="gemma3",
    from_gguf=partial(_from_gguf, name="gemma3"),
    names=_NAMES,
    rename=text_name,
    gguf_changes=_NO_OFFSETS,
)
