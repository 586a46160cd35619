"""Granite 3 and 4: Llama with multipliers for embeddings, scores, residuals and logits; dense or with experts."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf
from models.families.experts import with_experts
from models.families.family import NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.spec import Experts, FeedForward, Layer, ModelSpec, each_attention, each_layer


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
    """Read Granite 4 without state-space layers: its feed-forward, or its shared expert, is called shared_mlp."""
    kinds = fields.raw.get("layer_types", fields.raw.get("layers_block_type"))
    if not isinstance(kinds, list) or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise ModelError(
            f"{fields.where} requires state-space layers, which are not supported; choose a Granite 4 model without "
            "them."
        )
    size = fields.integer("shared_intermediate_size", 1024)
    count = fields.integer("num_local_experts", 8, least=0, limit=4096)
    rotated = fields.raw.get("position_embedding_type") == "rope"
    spec = _from_hf(architecture, fields)
    if not rotated:
        spec = each_attention(spec, lambda _, attention: replace(attention, rope=None))
    if count:
        return _sparse(
            spec, count, fields.integer("num_experts_per_tok", 2), fields.integer("intermediate_size"), size
        )
    return each_layer(spec, lambda _, layer: replace(layer, feed_forward=FeedForward(size)))


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    return _multiplied_of_gguf("granite", base_spec_of_gguf("GraniteForCausalLM", "granite", config), config)


def _sparse_from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "granitemoe", config.fields
    spec = base_spec_of_gguf("GraniteMoeForCausalLM", name, config, experts=True)
    return _sparse(
        _multiplied_of_gguf(name, spec, config),
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
    names={
        **SPARSE.names,
        "gate": "shared_mlp.gate",
        "up": "shared_mlp.up",
        "down": "shared_mlp.output_linear",
    },
    packed={**SPARSE.packed, "shared_mlp.input_linear.{field}": ("shared.gate", "shared.up", "gate", "up")},
)
"""GGUF files of those without state-space layers have the architecture of Granite 3."""
