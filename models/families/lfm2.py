"""LFM2 and LFM2.5: short convolutions in most layers, attention with normed heads in the others."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf, kv_heads_by_layer
from models.families.experts import gguf_expert_layers, whole_numbers, with_experts
from models.families.family import GGUF_NAMES, NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.layer_kinds import layer_kinds, with_mixer
from models.spec import Experts, FeedForward, ModelSpec, ShortConvolution

_SIGMOID = 2
"""The number of the sigmoid among the scorings of experts in GGUF files."""


def _dense_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12_288))
    if fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.integer("block_multiple_of", 256)
        size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return _from_hf(architecture, fields, size)


def _sparse_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    spec = _from_hf(architecture, fields, fields.integer("intermediate_size", 7_168))
    _check_scale(fields, "routed_scaling_factor")
    experts = Experts(
        fields.integer("num_experts", 32, limit=4096),
        fields.integer("num_experts_per_tok", 4),
        FeedForward(fields.integer("moe_intermediate_size", 1_792)),
        renormalise=fields.flag("norm_topk_prob", True),
        scoring="sigmoid",
        selection_bias=fields.flag("use_expert_bias", True),
    )
    return with_experts(
        spec, experts, range(fields.integer("num_dense_layers", 2, least=0), len(spec.layers))
    )


def _from_hf(architecture: str, fields: Fields, size: int) -> ModelSpec:
    """Return the network with a dense feed-forward of this size in every layer."""
    fields = fields.or_else(num_key_value_heads=8, max_position_embeddings=128_000, rope_theta=1e6)
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    norm = fields.number("norm_eps", 1e-5)
    changes = {"intermediate_size": size, "rms_norm_eps": norm, "tie_word_embeddings": tied}
    spec = base_spec(architecture, replace(fields, raw={**fields.raw, **changes}), head_norm=True)
    width, bias = fields.integer("conv_L_cache", 3, limit=1024), fields.flag("conv_bias")
    return with_convolutions(spec, _convolutions(fields, len(spec.layers)), width, bias)


def _convolutions(fields: Fields, layers: int) -> list[bool]:
    """Return which layers of a config.json are convolutions: by layer_types, otherwise all but full_attn_idxs."""
    kinds = layer_kinds(fields, layers, ("conv", "full_attention"))
    if kinds is not None:
        return [kind == "conv" for kind in kinds]
    if fields.raw.get("full_attn_idxs") is None:
        return [False] * layers
    attending = whole_numbers(fields, "full_attn_idxs")
    return [index not in attending for index in range(layers)]


def _dense_from_gguf(config: GGUFConfig) -> ModelSpec:
    return _from_gguf("Lfm2ForCausalLM", "lfm2", config)


def _sparse_from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "lfm2moe", config.fields
    spec = _from_gguf("Lfm2MoeForCausalLM", name, config)
    _check_scale(fields, f"{name}.expert_weights_scale")
    if fields.integer(f"{name}.expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ModelError(f"{name}.expert_gating_func in {fields.where} is not {_SIGMOID}, the sigmoid.")
    experts = Experts(
        fields.integer(f"{name}.expert_count", limit=4096),
        fields.integer(f"{name}.expert_used_count"),
        FeedForward(fields.integer(f"{name}.expert_feed_forward_length")),
        scoring="sigmoid",
        selection_bias=any(tensor.endswith(".exp_probs_b.bias") for tensor in config.tensors),
    )
    return with_experts(spec, experts, gguf_expert_layers(config, spec))


def _from_gguf(architecture: str, name: str, config: GGUFConfig) -> ModelSpec:
    """Return the network with a dense feed-forward in every layer; convolutions are layers with 0 KV heads."""
    config, counts = kv_heads_by_layer(config, name)
    spec = base_spec_of_gguf(architecture, name, config, head_norm=True, experts=name == "lfm2moe")
    bias = any(tensor.endswith(".shortconv.conv.bias") for tensor in config.tensors)
    width = config.fields.integer(f"{name}.shortconv.l_cache", limit=1024)
    return with_convolutions(spec, [count == 0 for count in counts], width, bias)


def with_convolutions(spec: ModelSpec, convolutions: list[bool], width: int, bias: bool) -> ModelSpec:
    """Return `spec` with short convolutions in place of the attention of some layers. Raises ModelError if of all."""
    return with_mixer(spec, ShortConvolution(spec.hidden_size, width, bias), convolutions)


def _check_scale(fields: Fields, key: str) -> None:
    if fields.number(key, 1.0) != 1.0:
        raise ModelError(f"{key} in {fields.where} is {fields.raw[key]}; only 1 is supported.")


LFM2_NAMES = {
    **NAMES,
    "attention_norm": "operator_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "out": "self_attn.out_proj",
    "conv_in": "conv.in_proj",
    "filters": "conv.conv",
    "conv_out": "conv.out_proj",
    "feed_forward_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "router": "feed_forward.gate",
    "selection_bias": "feed_forward.expert_bias",
    "experts.gate": "feed_forward.experts.{}.w1",
    "experts.up": "feed_forward.experts.{}.w3",
    "experts.down": "feed_forward.experts.{}.w2",
    "final_norm": "model.embedding_norm",
}
_GGUF_NAMES = {
    **GGUF_NAMES,
    "conv_in": "shortconv.in_proj",
    "filters": "shortconv.conv",
    "conv_out": "shortconv.out_proj",
    "selection_bias": "exp_probs_b.bias",
    "final_norm": "token_embd_norm",
}

FAMILY = Family(
    architectures=("Lfm2ForCausalLM",),
    model_types=("lfm2",),
    from_hf=_dense_from_hf,
    gguf_architecture="lfm2",
    from_gguf=_dense_from_gguf,
    names=LFM2_NAMES,
    gguf_names=_GGUF_NAMES,
)
SPARSE = Family(
    architectures=("Lfm2MoeForCausalLM",),
    model_types=("lfm2_moe",),
    from_hf=_sparse_from_hf,
    gguf_architecture="lfm2moe",
    from_gguf=_sparse_from_gguf,
    names=LFM2_NAMES,
    gguf_names=_GGUF_NAMES,
    packed={
        "feed_forward.experts.gate_up_proj": ("experts.gate", "experts.up"),
        "feed_forward.experts.down_proj": ("experts.down",),
    },
)
