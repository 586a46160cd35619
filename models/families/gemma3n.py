"""Gemma 3n, text only: several residual streams, sparse gates, residuals of low rank, shared keys and values."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from statistics import NormalDist
from typing import Any

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf, text_name
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.gemma4 import FAMILY as GEMMA4
from models.families.gemma4 import by_layer, check_activation, kv_givers, rounded_norm
from models.families.rope import ropes_by_layer, unscaled_of_gguf
from models.families.windows import sliding_layers
from models.spec import AltUp, Attention, FeedForward, Laurel, Layer, LayerInputs, ModelSpec, Norm, each_layer

_WITH_IMAGES = "Gemma3nForConditionalGeneration"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "sliding_window": 512,
}
_PERIOD = 5
"""One layer in each period of this many sees all tokens, where a config does not say."""
_SPARSITY, _SPARSE_LAYERS = 0.95, 10
"""The share of gates that are 0 in so many of the first layers, where a config does not say."""
_MOST_STREAMS = 8
_RANK = 64
"""The rank of the residuals beside the attention, which GGUF files do not mention."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    if architecture == _WITH_IMAGES:  # only its text model is run
        tied, fields = fields.flag("tie_word_embeddings", True), fields.mapping("text_config")
        fields = fields.or_else(tie_word_embeddings=tied)
    fields = fields.or_else(**_DEFAULTS)
    check_activation(fields)
    if fields.integer("altup_active_idx", 0, least=0):
        raise ModelError(f"altup_active_idx in {fields.where} is not 0, which is not supported.")
    if not fields.flag("altup_correct_scale", True):
        raise ModelError(f"altup_correct_scale in {fields.where} is false, which is not supported.")
    layers, bias = fields.integer("num_hidden_layers", limit=1024), fields.flag("attention_bias")
    sizes = by_layer(fields, "intermediate_size", layers)
    plain = {key: value for key, value in fields.raw.items() if key != "hidden_act" and "rope" not in key}
    plain["intermediate_size"] = sizes[0]
    spec = base_spec(architecture, replace(fields, raw=plain), qkv_bias=bias, out_bias=bias)
    thetas = fields.number("rope_theta", 1_000_000.0), fields.number("rope_local_base_freq", 10_000.0)
    ropes = ropes_by_layer(fields, spec.attention.head_dim, *thetas)
    local = sliding_layers(spec, fields, _local(layers))
    window = fields.integer("sliding_window")
    attentions = [
        replace(spec.attention, rope=ropes[is_local], window=window if is_local else None)
        for is_local in local
    ]
    vocab, norm = fields.integer("vocab_size_per_layer_input", 262_144), rounded_norm(spec)
    spec = replace(
        spec,
        logit_cap=fields.number("final_logit_softcapping"),
        altup=AltUp(_streams(fields, "altup_num_inputs"), norm),
        layer_inputs=LayerInputs(
            fields.integer("hidden_size_per_layer_input", 256),
            norm=norm,
            post_norm=norm,
            vocab_size=None if vocab == spec.vocab_size else vocab,
        ),
    )
    givers = kv_givers(local, fields.integer("num_kv_shared_layers", 15, least=0))
    feeds = _feeds(sizes, _cutoffs(fields, layers))
    return _gemma3n(spec, attentions, feeds, givers, fields.integer("laurel_rank", _RANK))


def _cutoffs(fields: Fields, layers: int) -> list[float | None]:
    """Return how many standard deviations above the mean the gates of each layer are cut off. Raises ModelError."""
    key = "activation_sparsity_pattern"
    if fields.raw.get(key) is None:
        return _usual_cutoffs(layers) if layers > _SPARSE_LAYERS else [None] * layers
    shares = fields.by_layer(key, layers)
    if not all(0 <= share < 1 for share in shares):
        raise ModelError(f"{key} in {fields.where} is {str(shares)[:60]}; it must be from 0 to below 1.")
    return [NormalDist().inv_cdf(share) if share else None for share in shares]


def _usual_cutoffs(layers: int) -> list[float | None]:
    return [NormalDist().inv_cdf(_SPARSITY) if index < _SPARSE_LAYERS else None for index in range(layers)]


def _local(layers: int) -> list[bool]:
    """Return which layers have a window: all but the last of each period."""
    return [(index + 1) % _PERIOD != 0 for index in range(layers)]


def _streams(fields: Fields, key: str) -> int:
    return fields.integer(key, 4, least=2, limit=_MOST_STREAMS)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "gemma3n", config.fields
    layers = fields.integer(f"{name}.block_count", limit=1024)
    sizes = by_layer(fields, f"{name}.feed_forward_length", layers)
    pattern = fields.raw.get(f"{name}.attention.sliding_window_pattern")
    kinds = pattern if isinstance(pattern, list) and len(pattern) == layers else _local(layers)
    local = [bool(is_local) for is_local in kinds]
    changes = {f"{name}.feed_forward_length": sizes[0], f"{name}.attention.sliding_window_pattern": local}
    config = config.with_fields(changes)
    spec = base_spec_of_gguf("Gemma3nForCausalLM", name, config)
    rope = unscaled_of_gguf(fields, name, fields.number(f"{name}.rope.freq_base_swa", 10_000.0))
    attentions = [
        replace(layer.attention, rope=rope) if is_local else layer.attention
        for layer, is_local in zip(spec.layers, local, strict=True)
    ]
    key, norm = f"{name}.activation_sparsity_scale", rounded_norm(spec)
    cutoffs = _usual_cutoffs(layers)
    if fields.raw.get(key) is not None:
        cutoffs = [cutoff if isfinite(cutoff) else None for cutoff in fields.by_layer(key, layers)]
    inputs = fields.integer(f"{name}.embedding_length_per_layer_input", 256)
    spec = replace(
        spec,
        logit_cap=fields.number(f"{name}.final_logit_softcapping", 30.0),
        altup=AltUp(_streams(fields, f"{name}.altup.num_inputs"), norm),
        layer_inputs=LayerInputs(inputs, norm=norm, post_norm=norm),
    )
    givers = kv_givers(local, fields.integer(f"{name}.attention.shared_kv_layers", 0, least=0))
    return _gemma3n(spec, attentions, _feeds(sizes, cutoffs), givers, _RANK)


def _feeds(sizes: Sequence[int], cutoffs: Sequence[float | None]) -> list[FeedForward]:
    return [
        FeedForward(size, "gelu_tanh", cutoff=cutoff) for size, cutoff in zip(sizes, cutoffs, strict=True)
    ]


def _gemma3n(
    spec: ModelSpec,
    attentions: Sequence[Attention],
    feeds: Sequence[FeedForward],
    givers: Sequence[int | None],
    rank: int,
) -> ModelSpec:
    """Return the network: each layer reads the keys and values of the layer in `givers`, or its own."""
    norm = rounded_norm(spec)

    def layer(index: int, _: Layer) -> Layer:
        attention = replace(attentions[index], scale=1.0, head_norm=norm, kv_from=givers[index])
        if attention.kv_from is None:
            attention = replace(attention, v_norm=Norm(norm.eps))
        return Layer(attention, feeds[index], *(norm,) * 4, laurel=Laurel(rank, norm))

    return replace(each_layer(spec, layer), final_norm=norm, embedding_scale=spec.hidden_size**0.5)


def _stream_names(inputs: str, outputs: str) -> dict[str, str]:
    """Return the names of the projections between the streams; {} stands for the stream's number."""
    found: dict[str, str] = {}
    for index in range(_MOST_STREAMS - 1):
        found |= {f"stream_in.{index}": inputs.format(index), f"stream_out.{index}": outputs.format(index)}
    return found


FAMILY = Family(
    architectures=("Gemma3nForCausalLM", _WITH_IMAGES),
    model_types=("gemma3n_text", "gemma3n"),
    from_hf=_from_hf,
    gguf_architecture="gemma3n",
    from_gguf=_from_gguf,
    names={
        **GEMMA4.names,
        **_stream_names("model.altup_projections.{}", "model.altup_unembed_projections.{}"),
        "altup_norm": "altup.router_norm",
        "altup_router": "altup.modality_router",
        "altup_predict": "altup.prediction_coefs",
        "altup_correct": "altup.correction_coefs",
        "altup_scale": "altup.correct_output_scale",
        "laurel_left": "laurel.linear_left",
        "laurel_right": "laurel.linear_right",
        "laurel_norm": "laurel.post_laurel_norm",
    },
    gguf_names={
        **GEMMA4.gguf_names,
        **_stream_names("altup_proj.{}", "altup_unembd_proj.{}"),
        "altup_norm": "altup_router_norm",
        "altup_router": "altup_router",
        "altup_predict": "altup_predict_coef",
        "altup_correct": "altup_correct_coef",
        "altup_scale": "altup_correct_scale.weight",
        "laurel_left": "laurel_l",
        "laurel_right": "laurel_r",
        "laurel_norm": "laurel_post_norm",
    },
    gguf_packed={
        "altup_proj.{field}": tuple(f"stream_in.{index}" for index in range(_MOST_STREAMS - 1)),
        "altup_unembd_proj.{field}": tuple(f"stream_out.{index}" for index in range(_MOST_STREAMS - 1)),
    },
    rename=text_name,
)
