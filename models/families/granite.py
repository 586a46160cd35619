"""Granite 3 and 4: Llama with multipliers for embeddings, scores, residuals and logits; dense or with experts.

Most layers of larger Granite 4 are Mamba-2.
"""

from dataclasses import replace

from models.families.common import base_spec, base_spec_of_gguf, kv_heads_by_layer
from models.families.experts import with_experts
from models.families.family import GGUF_NAMES, NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.layer_kinds import layer_kinds, with_mixer
from models.families.mamba2 import (
    MAMBA2_CHANGES,
    MAMBA2_GGUF_NAMES,
    MAMBA2_NAMES,
    mamba2_from_gguf,
    mamba2_from_hf,
)
from models.spec import Experts, FeedForward, Layer, ModelSpec, each_attention, each_layer

_RECURRENT = ("mamba", "linear_attention")


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    parts = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return _multiplied(spec, *(fields.number(part, 1.0) for part in parts))


def _sparse_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    return _sparse(
        _from_hf(architecture, fields),
        fields.integer("num_local_experts", 8, limit=4096),
        fields.integer("num_experts_per_tok", 2),
        fields.integer("intermediate_size"),
        fields.integer("shared_intermediate_size", 0, least=0),
    )


def _hybrid_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    """Read Granite 4, some of whose layers may be Mamba-2: its feed-forward, or shared expert, is called shared_mlp."""
    size = fields.integer("shared_intermediate_size", 1024)
    count = fields.integer("num_local_experts", 8, least=0, limit=4096)
    rotated = fields.raw.get("position_embedding_type") == "rope"
    spec = _from_hf(architecture, fields)
    if not rotated:
        spec = each_attention(spec, lambda _, attention: replace(attention, rope=None))
    if count:
        spec = _sparse(
            spec, count, fields.integer("num_experts_per_tok", 2), fields.integer("intermediate_size"), size
        )
    else:
        spec = each_layer(spec, lambda _, layer: replace(layer, feed_forward=FeedForward(size)))
    key = "layers_block_type" if fields.raw.get("layer_types") is None else "layer_types"
    kinds = layer_kinds(fields, len(spec.layers), (*_RECURRENT, "attention", "full_attention"), key, True)
    recurrent = [kind in _RECURRENT for kind in kinds or ()]
    if not any(recurrent):
        return spec
    mixer = mamba2_from_hf(fields, fields.integer("mamba_expand", 2) * spec.hidden_size)
    return with_mixer(spec, mixer, recurrent)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    return _multiplied_of_gguf("granite", base_spec_of_gguf("GraniteForCausalLM", "granite", config), config)


def _sparse_from_gguf(config: GGUFConfig) -> ModelSpec:
    name = "granitemoe"
    spec = base_spec_of_gguf("GraniteMoeForCausalLM", name, config, experts=True)
    return _sparse_of_gguf(name, _multiplied_of_gguf(name, spec, config), config.fields)


def _hybrid_from_gguf(config: GGUFConfig) -> ModelSpec:
    name = "granitehybrid"
    config, heads = kv_heads_by_layer(config, name)
    fields = config.fields
    spec = base_spec_of_gguf("GraniteMoeHybridForCausalLM", name, config, experts=True)
    spec = _multiplied_of_gguf(name, spec, config)
    if not fields.flag(f"{name}.rope.scaling.finetuned"):  # which says that heads are rotated
        spec = each_attention(spec, lambda _, attention: replace(attention, rope=None))
    if fields.raw.get(f"{name}.expert_count"):
        spec = _sparse_of_gguf(name, spec, fields)
    recurrent = [count == 0 for count in heads]
    if not any(recurrent):
        return spec
    return with_mixer(spec, mamba2_from_gguf(config, name, spec.final_norm), recurrent)


def _sparse_of_gguf(name: str, spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Return `spec` with the experts of a GGUF file in every layer."""
    return _sparse(
        spec,
        fields.integer(f"{name}.expert_count", limit=4096),
        fields.integer(f"{name}.expert_used_count"),
        fields.integer(f"{name}.feed_forward_length"),
        fields.integer(f"{name}.expert_shared_feed_forward_length", 0, least=0),
    )


def _sparse(spec: ModelSpec, count: int, chosen: int, size: int, shared: int) -> ModelSpec:
    """Return `spec` with experts in every layer; a softmax over the chosen ones equals a renormalised full one."""
    experts = Experts(count, chosen, FeedForward(size), shared=FeedForward(shared) if shared else None)
    return with_experts(spec, experts, range(len(spec.layers)))


def _multiplied_of_gguf(name: str, spec: ModelSpec, config: GGUFConfig) -> ModelSpec:
    fields = config.fields
    scale = fields.number(f"{name}.attention.scale", spec.attention.softmax_scale)
    parts = ("embedding_scale", "residual_scale", "logit_scale")
    embedding, residual, logits = (fields.number(f"{name}.{part}", 1.0) for part in parts)
    return _multiplied(spec, embedding, scale, residual, logits)


def _multiplied(
    spec: ModelSpec, embedding: float, attention: float, residual: float, logits: float
) -> ModelSpec:
    """Return `spec` with the multipliers; logits are divided by `logits`."""
    scale = None if attention == spec.attention.softmax_scale else attention

    def multiplied(_: int, layer: Layer) -> Layer:
        return replace(layer, mixer=replace(layer.attention, scale=scale), residual_scale=residual)

    return replace(each_layer(spec, multiplied), embedding_scale=embedding, logit_scale=1.0 / logits)


FAMILY = Family(
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    from_hf=_from_hf,
    gguf_architecture="granite",
    from_gguf=_from_gguf,
    gguf_interleaved=("q", "k"),
)
SPARSE = Family(
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    model_types=("granitemoe", "granitemoeshared"),
    from_hf=_sparse_from_hf,
    gguf_architecture="granitemoe",
    from_gguf=_sparse_from_gguf,
    names={
        **NAMES,
        "router": "block_sparse_moe.router.layer",
        "shared.gate": "shared_mlp.gate",
        "shared.up": "shared_mlp.up",
        "shared.down": "shared_mlp.output_linear",
    },
    packed={
        "block_sparse_moe.input_linear.{field}": ("experts.gate", "experts.up"),
        "block_sparse_moe.output_linear.{field}": ("experts.down",),
        "shared_mlp.input_linear.{field}": ("shared.gate", "shared.up"),
    },
    gguf_interleaved=("q", "k"),
)
HYBRID = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    from_hf=_hybrid_from_hf,
    gguf_architecture="granitehybrid",
    from_gguf=_hybrid_from_gguf,
    gguf_names={**GGUF_NAMES, **MAMBA2_GGUF_NAMES},
    gguf_interleaved=("q", "k"),
    names={
        **SPARSE.names,
        **MAMBA2_NAMES,
        "gate": "shared_mlp.gate",
        "up": "shared_mlp.up",
        "down": "shared_mlp.output_linear",
    },
    packed={**SPARSE.packed, "shared_mlp.input_linear.{field}": ("shared.gate", "shared.up", "gate", "up")},
    changes=MAMBA2_CHANGES,
)
"""GGUF files of those without Mamba-2 layers have the architecture of Granite 3."""
