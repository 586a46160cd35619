"""Rotary positions from the configs of Hugging Face models and GGUF files."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast, get_args

from models.errors import ModelError
from models.families.family import GGUFConfig
from models.families.fields import Fields
from models.spec import Attention, LatentAttention, ModelSpec, Rope, RopeKind

_PROPORTIONAL = "proportional"
"""A kind that is described by divisors of frequencies."""


def rope_from_hf(fields: Fields, head_dim: int) -> Rope:
    """Return the rotation of a config that has the same one for all layers. Raises ModelError.

    The parameters take precedence over a rope_theta beside them.
    """
    rope = rope_parameters(fields)
    if nested := next((key for key, value in rope.raw.items() if isinstance(value, Mapping)), None):
        raise ModelError(
            f"{rope.where} has values of its own for {nested[:60]!r}, but all layers of this model rotate alike; "
            "write these values into it directly."
        )
    return rope_from_part(rope, fields, head_dim)


def rope_parameters(fields: Fields) -> Fields:
    """Return rope_parameters or, if there is one, rope_scaling, which replaces it as a whole in transformers 5.

    See `RotaryEmbeddingConfigMixin.convert_rope_params_to_dict` there.
    """
    scaling = fields.mapping("rope_scaling")
    return scaling if scaling.raw else fields.mapping("rope_parameters")


def ropes_by_layer(
    fields: Fields, head_dim: int, whole_theta: float, local_theta: float
) -> tuple[Rope, Rope]:
    """Return the rotations of layers that see all tokens, and of those with a sliding window. Raises ModelError.

    As in transformers 5 (`Gemma3TextConfig`), each kind of layer has its own part of rope_parameters, and rope_scaling
    replaces single values of the layers that see all tokens. The thetas are the defaults of parts that have none.
    """
    given, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    beside = {key: value for key, value in fields.raw.items() if key != "original_max_position_embeddings"}
    fields = replace(fields, raw=beside)
    whole, local = given.mapping("full_attention"), given.mapping("sliding_attention")
    kind = {"rope_type": scaling.raw["type"]} if "type" in scaling.raw else {}
    whole = replace(whole, raw={"rope_theta": whole_theta, **whole.raw, **kind, **scaling.raw})
    local = replace(local, raw={"rope_theta": local_theta, **local.raw})
    return rope_from_part(whole, fields, head_dim), rope_from_part(local, fields, head_dim)


def rotated_layers(fields: Fields, layers: int, interval: int) -> list[bool]:
    """Return which layers are rotated: those with a 1 in no_rope_layers, or all but the last of each interval.

    `interval` is the default for a config without one. Raises ModelError.
    """
    rotated = fields.raw.get("no_rope_layers")  # despite its name, 1 for a layer with rotary embedding
    if rotated is None:
        interval = fields.integer("no_rope_layer_interval", interval)
        return [(index + 1) % interval != 0 for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(has not in (0, 1) for has in rotated):
        raise ModelError(
            f"no_rope_layers in {fields.where} is {str(rotated)[:60]}; it must be a list of a 0 or 1 for each layer."
        )
    return [bool(has) for has in rotated[:layers]]


def replaced_theta(raw: Mapping[str, Any], spec: ModelSpec) -> str | None:
    """Return a line for the user if rope_scaling replaces a rope_theta in rope_parameters; otherwise None."""
    given, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    mixers = (layer.mixer for layer in spec.layers)
    rope = next((mixer.rope for mixer in mixers if isinstance(mixer, Attention | LatentAttention)), None)
    theta = given.get("rope_theta") if isinstance(given, Mapping) else None
    if not scaling or theta is None or rope is None or rope.theta == theta:
        return None
    return (
        f"rope_scaling in config.json replaces rope_parameters, so that rope_theta is {rope.theta:g} and not "
        f"{theta:g}; if that is not intended, write rope_theta into rope_scaling."
    )


def rope_from_part(rope: Fields, fields: Fields, head_dim: int) -> Rope:
    """Return the rotation with the parameters `rope`, or those of the config where they are missing.

    Raises ModelError.
    """
    kind, known = (
        rope.raw.get("rope_type", rope.raw.get("type", "default")),
        (*get_args(RopeKind), _PROPORTIONAL),
    )
    if kind not in known:
        raise ModelError(
            f"RoPE scaling {str(kind)[:60]!r} in {rope.where} is not supported; supported: {', '.join(known)}."
        )
    part = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    dims = int(head_dim * part)
    if not 2 <= dims <= head_dim or dims % 2:
        raise ModelError(
            f"partial_rotary_factor in {rope.where} is {part}, so that {dims} numbers of {head_dim} would "
            f"be rotated; it must be an even number from 2 to {head_dim}."
        )
    theta = _theta(rope, "rope_theta", _theta(fields, "rope_theta", 10_000.0))
    if kind == _PROPORTIONAL:
        return _proportional(theta, rope.number("factor", 1.0), dims // 2, head_dim // 2)
    whole = Rope(theta, cast(RopeKind, kind))
    whole = replace(whole, dims=None if dims == head_dim else dims)
    return whole if kind == "default" else _scaled(whole, rope, fields, dims)


def _proportional(theta: float, factor: float, turning: int, pairs: int) -> Rope:
    """Return a rotation of `pairs` pairs across the whole head, whose last ones do not turn: all but `turning`."""
    divisors = None if turning == pairs else (1.0,) * turning + (math.inf,) * (pairs - turning)
    return Rope(theta, "default" if factor == 1.0 else "linear", factor, frequency_factors=divisors)


def _theta(fields: Fields, key: str, usual: float) -> float:
    theta = fields.number(key, usual)
    if theta <= 1.0:
        raise ModelError(f"{key} in {fields.where} is {theta}; it must be above 1.")
    return theta


def _scaled(plain: Rope, rope: Fields, fields: Fields, dims: int) -> Rope:
    """Add the parameters of its kind to `plain`; the formulas for attention factors are those of transformers."""
    if plain.kind in ("linear", "dynamic"):
        return replace(plain, factor=rope.number("factor"))
    most = fields.integer("max_position_embeddings")
    # The config's own value takes precedence, as in transformers (`standardize_rope_params`).
    original = fields.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", most)
    )
    plain = replace(plain, original_positions=original)
    if plain.kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low > high:
            raise ModelError(
                f"low_freq_factor in {rope.where} is {low}; it must not be above high_freq_factor, {high}."
            )
        return replace(plain, factor=rope.number("factor"), low_freq_factor=low, high_freq_factor=high)
    factor = rope.number("factor", most / original)
    if plain.kind == "longrope":
        short, long = (rope.numbers(f"{length}_factor", dims // 2) for length in ("short", "long"))
        attention = rope.number("attention_factor", longrope_attention(factor, original))
        return replace(plain, frequency_factors=short, long_factors=long, attention_factor=attention)
    usual = yarn_attention(factor)
    if rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        each, all_dims = rope.number("mscale"), rope.number("mscale_all_dim")
        usual = yarn_attention(factor, each) / yarn_attention(factor, all_dims)
    return replace(
        plain,
        factor=factor,
        attention_factor=rope.number("attention_factor", usual),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """Return the factor of cos and sin for yarn (Peng et al. 2023)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def longrope_attention(factor: float, original: int) -> float:
    """Return the factor of cos and sin for longrope (Ding et al. 2024)."""
    return 1.0 if factor <= 1.0 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))


_WITH_LOG_MULTIPLIER = frozenset({"mistral3", "deepseek2"})
"""Architectures whose yarn_log_multiplier llama.cpp reads: mscale_all_dim, beside an mscale of 1."""


def rope_from_gguf(config: GGUFConfig, name: str, dims: int) -> Rope:
    """Return the rotation in the metadata of the architecture `name`, with `dims` rotated numbers per head.

    The keys are read as llama.cpp reads them (load_hparams in llama-model.cpp, llama_context in llama-context.cpp).
    Raises ModelError.
    """
    fields, factors, long = config.fields, config.rope_factors, config.long_factors
    for found in (factors, long):
        if found is not None and len(found) != dims // 2:
            raise ModelError(
                f"The file's divisors of RoPE frequencies are {len(found)}, but a rotation of {dims} numbers "
                f"needs {dims // 2}; the GGUF file is damaged: download it again."
            )
    at = f"{name}.rope.scaling."
    kind, factor = _gguf_kind(fields, name), _gguf_factor(fields, name)
    plain = unscaled_of_gguf(fields, name, _theta(fields, f"{name}.rope.freq_base", 10_000.0))
    if long is not None and factors is not None:
        if kind == "yarn":
            raise ModelError(
                "RoPE scaling 'yarn' with tensors of long divisors in the GGUF file is not supported."
            )
        most = fields.integer(f"{name}.context_length")
        original = fields.integer(f"{at}original_context_length", most)
        return replace(
            plain,
            kind="longrope",
            original_positions=original,
            frequency_factors=tuple(factor * each for each in factors),
            long_factors=tuple(factor * each for each in long),
            attention_factor=fields.number(f"{at}attn_factor", longrope_attention(most / original, original)),
        )
    if fields.raw.get(f"{at}type") == "longrope":
        raise ModelError(
            "The GGUF file asks for RoPE scaling 'longrope', but has no tensors rope_factors_long.weight and "
            "rope_factors_short.weight; it is incomplete: download it again."
        )
    plain = replace(plain, frequency_factors=factors)
    usual = yarn_attention(factor) if kind == "yarn" else 1.0
    if kind == "yarn" and fields.raw.get(f"{at}yarn_log_multiplier"):
        usual /= yarn_attention(factor, fields.number(f"{at}yarn_log_multiplier"))
    attention = fields.number(f"{at}yarn_attn_factor", usual) * plain.attention_factor
    plain = replace(plain, attention_factor=attention)
    if factor == 1.0:
        return plain
    plain = replace(plain, kind=kind, factor=factor)
    if kind == "linear":
        return plain
    return replace(
        plain,
        original_positions=fields.integer(
            f"{at}original_context_length", fields.integer(f"{name}.context_length")
        ),
        beta_fast=fields.number(f"{at}yarn_beta_fast", 32.0),
        beta_slow=fields.number(f"{at}yarn_beta_slow", 1.0),
    )


def unscaled_of_gguf(fields: Fields, name: str, theta: float) -> Rope:
    """Return the rotation of layers whose frequencies are not scaled. Raises ModelError."""
    return Rope(theta, attention_factor=fields.number(f"{name}.rope.scaling.attn_factor", 1.0))


def _gguf_kind(fields: Fields, name: str) -> Literal["linear", "yarn"]:
    """Return how frequencies are scaled, as in llama.cpp: "linear" by default and for "none" (with the factor 1)."""
    at = f"{name}.rope.scaling."
    kind = fields.raw.get(f"{at}type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelError(
            f"RoPE scaling {str(kind)[:60]!r} of the GGUF file is not supported; supported: linear, yarn, longrope."
        )
    extrapolated = fields.raw.get(
        f"{at}yarn_ext_factor", -1
    )  # the share of yarn in the mix; negative: not set
    if not isinstance(extrapolated, int | float) or 0 < extrapolated != 1:
        raise ModelError(
            f"{at}yarn_ext_factor in the GGUF file is {str(extrapolated)[:60]}; supported: 0 and 1."
        )
    is_yarn = extrapolated == 1 if extrapolated >= 0 else kind == "yarn"
    if is_yarn and name not in _WITH_LOG_MULTIPLIER and fields.raw.get(f"{at}yarn_log_multiplier"):
        raise ModelError(
            "RoPE scaling 'yarn with a log multiplier' of the GGUF file is not supported; supported: linear, yarn, "
            "longrope."
        )
    return "yarn" if is_yarn else "linear"


def _gguf_factor(fields: Fields, name: str) -> float:
    """Return the factor of the scaling. As in llama.cpp, 0 means none, and the older key counts without the newer."""
    keys = f"{name}.rope.scaling.factor", f"{name}.rope.scale_linear"
    key = keys[0] if keys[0] in fields.raw else keys[1]
    if fields.raw.get(f"{name}.rope.scaling.type") == "none" or fields.raw.get(key) == 0:
        return 1.0
    return fields.number(key, 1.0)
