"""Mistral Small 3.1 and later, Magistral Small, Ministral 3, Devstral 2: only the text model is run.

That of the newer ones is Mistral with a scale of queries that grows with their positions.
"""

from dataclasses import replace
from typing import Any

from models.errors import ModelError
from models.families import llama
from models.families.common import base_spec, base_spec_of_gguf, text_name
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_parameters
from models.families.windows import windows
from models.spec import ModelSpec, QueryScaling, each_attention

_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The rope_parameters of a config without any."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    text = fields.mapping("text_config")
    kind = text.raw.get("model_type", "mistral")
    tied = fields.flag("tie_word_embeddings")
    text = replace(text, raw={"tie_word_embeddings": tied, **text.raw})
    if kind == "mistral":
        return replace(llama.FAMILY.from_hf("MistralForCausalLM", text), architecture=architecture)
    if kind == "ministral3":
        return _text_from_hf(architecture, text)
    raise ModelError(
        f"The text part of {fields.where} is {str(kind)[:60]}, which is not supported; supported: mistral, ministral3."
    )


def _text_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = replace(fields, raw={**_DEFAULTS, **fields.raw}).or_else(rope_parameters=_ROPE)
    spec = windows(base_spec(architecture, fields), fields, fields.raw.get("sliding_window"))
    return _scaled(spec, rope_parameters(fields), "llama_4_scaling_beta", "original_max_position_embeddings")


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    spec = base_spec_of_gguf("Ministral3ForCausalLM", "mistral3", config)
    beta, positions = "mistral3.attention.temperature_scale", "mistral3.rope.scaling.original_context_length"
    return _scaled(spec, config.fields, beta, positions)


def _scaled(spec: ModelSpec, fields: Fields, beta: str, positions: str) -> ModelSpec:
    """Return `spec` with the scale of queries that the fields of these names describe, if there is one."""
    rope = spec.attention.rope
    if rope is None or not fields.raw.get(beta):
        return spec
    original = rope.original_positions or fields.integer(positions, spec.max_positions)
    scaling = QueryScaling(fields.number(beta), original)
    return each_attention(spec, lambda _, attention: replace(attention, query_scaling=scaling))


FAMILY = Family(
    architectures=("Mistral3ForConditionalGeneration",),
    model_types=("mistral3",),
    from_hf=_from_hf,
    rename=text_name,
)
"""GGUF files of these models have the architecture of Llama or that of `TEXT`."""
TEXT = Family(
    architectures=("Ministral3ForCausalLM",),
    model_types=("ministral3",),
    from_hf=_text_from_hf,
    gguf_architecture="mistral3",
    from_gguf=_from_gguf,
    gguf_interleaved=("q", "k"),
)
