"""The rotation of positions, from the configs of Hugging Face and of GGUF files."""

from typing import cast, get_args

from models.errors import ModelError
from models.families.fields import Fields
from models.spec import Rope, RopeKind


def rope_from_hf(fields: Fields) -> Rope:
    """From rope_parameters (transformers 5) or from rope_theta and rope_scaling (before). Raises ModelError."""
    rope = fields.mapping("rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling")
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind not in get_args(RopeKind):
        raise ModelError(
            f"RoPE scaling {str(kind)[:60]!r} in {rope.where} is not supported; "
            f"supported: {', '.join(get_args(RopeKind))}."
        )
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"partial_rotary_factor in {rope.where} is not 1, which is not supported.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return Rope(theta)
    factor = rope.number("factor")
    if kind != "llama3":
        return Rope(theta, cast(RopeKind, kind), factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(
            f"low_freq_factor in {rope.where} is {low}; it must be below high_freq_factor, {high}."
        )
    original = rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
    return Rope(theta, "llama3", factor, low, high, original)


def rope_from_gguf(fields: Fields, name: str, head_dim: int, factors: tuple[float, ...] | None) -> Rope:
    """From the metadata of the architecture `name`; `factors` are those of the file's rope_freqs. Raises ModelError."""
    if factors is not None and len(factors) != head_dim // 2:
        raise ModelError(
            f"rope_freqs.weight has {len(factors)} values, but a head of {head_dim} "
            f"needs {head_dim // 2}; the GGUF file is damaged: download it again."
        )
    theta = fields.number(f"{name}.rope.freq_base", 10_000.0)
    kind = fields.raw.get(f"{name}.rope.scaling.type", "none")
    if kind == "linear":
        factor = fields.number(f"{name}.rope.scaling.factor")
        return Rope(theta, "linear", factor, frequency_factors=factors)
    if kind != "none":
        raise ModelError(
            f"RoPE scaling {str(kind)[:60]!r} of the GGUF file is not supported; supported: linear."
        )
    return Rope(theta, frequency_factors=factors)
