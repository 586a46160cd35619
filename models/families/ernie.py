"""ERNIE 4.5: RoPE on neighbouring pairs in fp32; sparse models have shared experts and a selection bias."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf
from models.families.experts import gguf_expert_layers, with_experts
from models.families.family import NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.spec import Experts, FeedForward, ModelSpec, each_attention

_DEFAULTS = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_NORM_MIN = 1e-12
"""The minimum of the sum by which the weights of the chosen experts are divided."""


def _dense(architecture: str, fields: Fields, head_dim: int | None = 128) -> ModelSpec:
    fields = replace(fields, raw={**_DEFAULTS, **fields.raw})
    bias = fields.flag("use_bias")
    return _rotated(
        base_spec(architecture, fields, head_dim=head_dim, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    )


def _sparse(architecture: str, fields: Fields) -> ModelSpec:
    spec = _dense(architecture, fields, head_dim=None)
    if fields.number("moe_norm_min", _NORM_MIN) != _NORM_MIN:
        raise ModelError(f"moe_norm_min in {fields.where} is not {_NORM_MIN}, which is not supported.")
    if fields.flag("use_bias"):  # the head would have a bias, too
        raise ModelError(f"use_bias in {fields.where} is true, which is not supported with experts.")
    last = fields.raw.get("moe_layer_end_index", -1)
    first, last = (
        fields.integer("moe_layer_start_index", 1, least=0),
        len(spec.layers) if last == -1 else fields.integer("moe_layer_end_index", least=0),
    )
    step = fields.integer("moe_layer_interval", 1)
    experts = _experts(
        fields.integer("moe_num_experts", 64, limit=4096),
        fields.integer("moe_k", 6),
        fields.integer("moe_intermediate_size", 1536),
        fields.integer("moe_num_shared_experts", 2, least=0, limit=4096),
    )
    sparse = [i for i in range(len(spec.layers)) if first <= i <= last and (i + 1) % step == 0]
    return with_experts(spec, experts, sparse)


def _sparse_of_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "ernie4_5-moe", config.fields
    spec = _rotated(base_spec_of_gguf("Ernie4_5_MoeForCausalLM", name, config, experts=True))
    experts = _experts(
        fields.integer(f"{name}.expert_count", limit=4096),
        fields.integer(f"{name}.expert_used_count"),
        fields.integer(f"{name}.expert_feed_forward_length"),
        fields.integer(f"{name}.expert_shared_count", 0, least=0, limit=4096),
    )
    return with_experts(spec, experts, gguf_expert_layers(config, spec))


def _experts(count: int, chosen: int, size: int, shared: int) -> Experts:
    return Experts(
        count,
        chosen,
        FeedForward(size),
        exact_router=True,
        selection_bias=True,
        shared=FeedForward(size * shared) if shared else None,
    )


def _rotated(spec: ModelSpec) -> ModelSpec:
    """Return `spec` with ERNIE's rotation."""
    assert spec.attention.rope is not None
    rope = replace(spec.attention.rope, interleaved=True, exact=True)
    return each_attention(spec, lambda _, attention: replace(attention, rope=rope))


def _name(name: str) -> str:
    return name.replace("mlp.gate.moe_statics", "mlp.moe_statics")


FAMILY = Family(
    architectures=("Ernie4_5_ForCausalLM", "Ernie4_5ForCausalLM"),
    model_types=("ernie4_5", "ernie4_5"),
    from_hf=_dense,
    gguf_architecture="ernie4_5",
    from_gguf=lambda config: _rotated(base_spec_of_gguf("Ernie4_5ForCausalLM", "ernie4_5", config)),
    rename=_name,
)
SPARSE = Family(
    architectures=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    from_hf=_sparse,
    gguf_architecture="ernie4_5-moe",
    from_gguf=_sparse_of_gguf,
    names={
        **NAMES,
        "selection_bias": "mlp.moe_statics.e_score_correction_bias",
        "shared.gate": "mlp.shared_experts.gate_proj",
        "shared.up": "mlp.shared_experts.up_proj",
        "shared.down": "mlp.shared_experts.down_proj",
    },
    rename=_name,
)
