"""Granite 3, dense: Llama with multipliers of embeddings, attention scores, residuals and logits."""

from dataclasses import replace

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.spec import ModelSpec


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    parts = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return _multiplied(spec, *(fields.number(part, 1.0) for part in parts))


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    spec, fields = base_spec_of_gguf("GraniteForCausalLM", "granite", config), config.fields
    scale = fields.number("granite.attention.scale", spec.attention.softmax_scale)
    parts = ("embedding_scale", "residual_scale", "logit_scale")
    embedding, residual, logits = (fields.number(f"granite.{part}", 1.0) for part in parts)
    return _multiplied(spec, embedding, scale, residual, logits)


def _multiplied(
    spec: ModelSpec, embedding: float, attention: float, residual: float, logits: float
) -> ModelSpec:
    """`spec` with the multipliers; logits are divided by theirs."""
    usual = attention == spec.attention.softmax_scale
    layers = (
        replace(
            layer,
            attention=replace(layer.attention, scale=None if usual else attention),
            residual_scale=residual,
        )
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers), embedding_scale=embedding, logit_scale=1.0 / logits)


FAMILY = Family(
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    from_hf=_from_hf,
    gguf_architecture="granite",
    from_gguf=_from_gguf,
    gguf_interleaved=("q", "k"),
)
