"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, or a feed-forward alone."""

from dataclasses import replace
from functools import partial
from math import inf

from models.errors import ModelError
from models.families.common import check_heads, kv_heads_by_layer
from models.families.experts import check_experts
from models.families.family import GGUF_NAMES, NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.mamba2 import MAMBA2_CHANGES, MAMBA2_GGUF_NAMES, MAMBA2_NAMES, checked, mamba2_from_gguf
from models.recurrences import Mamba2
from models.spec import Attention, Experts, FeedForward, Layer, ModelSpec, Norm

_LEAST_STEP = 0.001
"""The usual time_step_min, which GGUF files do not tell."""
_KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}
"""The kinds of layers, in lists and in patterns."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    for key, value in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if fields.raw.get(key, value) != value:
            raise ModelError(f"{key} in {fields.where} is {str(fields.raw[key])[:60]!r}; supported: {value}.")
    norm = Norm(fields.number("layer_norm_epsilon", 1e-5))
    kinds = _kinds(fields)
    if "attention" not in kinds:
        raise ModelError(
            "The config has no layer with attention, which is not supported; choose another model."
        )
    parts: dict[str, Layer] = {}
    for kind in set(kinds):
        if kind in ("mamba", "attention"):
            mixer = _mamba2(fields, norm) if kind == "mamba" else _attention(fields)
            parts[kind] = Layer(mixer, None, norm, feed_forward_norm=None)
        else:
            feed = _experts(fields) if kind == "moe" else _feed(fields, "intermediate_size", 21_504)
            parts[kind] = Layer(None, feed, None, feed_forward_norm=norm)
    return ModelSpec(
        architecture,
        fields.integer("vocab_size"),
        fields.integer("hidden_size"),
        fields.integer("max_position_embeddings", 4096),
        tuple(parts[kind] for kind in kinds),
        norm,
        fields.flag("tie_word_embeddings"),
    )


def _from_gguf(config: GGUFConfig, name: str) -> ModelSpec:
    config, heads = kv_heads_by_layer(config, name)
    fields = config.fields
    norm = Norm(fields.number(f"{name}.attention.layer_norm_rms_epsilon"))
    sizes = fields.raw.get(f"{name}.feed_forward_length")
    size = max(sizes) if isinstance(sizes, list) else sizes
    attention = Attention(
        fields.integer(f"{name}.attention.head_count"),
        fields.integer(f"{name}.attention.head_count_kv"),
        fields.integer(f"{name}.attention.key_length"),
    )
    check_heads(attention.heads, attention.kv_heads, attention.head_dim)

    def layer(index: int) -> Layer:
        def has(part: str) -> bool:
            return f"blk.{index}.{part}" in config.tensors

        if has("ssm_in.weight"):
            return Layer(
                mamba2_from_gguf(config, name, norm, _LEAST_STEP), None, norm, feed_forward_norm=None
            )
        if has("attn_q.weight"):
            return Layer(attention, None, norm, feed_forward_norm=None)
        if has("ffn_gate_inp.weight"):
            return Layer(None, _experts_of_gguf(config, name), None, feed_forward_norm=norm)
        dense = FeedForward(
            Fields({"size": size}, fields.where).integer("size"), "relu2", False, has("ffn_up.bias")
        )
        return Layer(None, dense, None, feed_forward_norm=norm)

    tokens = fields.raw.get("tokenizer.ggml.tokens")
    return ModelSpec(
        "NemotronHForCausalLM",
        len(tokens) if isinstance(tokens, list) else fields.integer(f"{name}.vocab_size"),
        fields.integer(f"{name}.embedding_length"),
        fields.integer(f"{name}.context_length"),
        tuple(layer(index) for index in range(len(heads))),
        norm,
        "output.weight" not in config.tensors,
    )


def _experts_of_gguf(config: GGUFConfig, name: str) -> Experts:
    fields = config.fields
    latent = fields.raw.get(f"{name}.moe_latent_size")
    shared = FeedForward(
        fields.integer(f"{name}.expert_shared_feed_forward_length"),
        "relu2",
        gated=False,
        bias=any(tensor.endswith(".ffn_up_shexp.bias") for tensor in config.tensors),
    )
    return check_experts(
        Experts(
            fields.integer(f"{name}.expert_count", limit=4096),
            fields.integer(f"{name}.expert_used_count"),
            FeedForward(fields.integer(f"{name}.expert_feed_forward_length"), "relu2", gated=False),
            renormalise=fields.flag(f"{name}.expert_weights_norm", True),
            scoring="sigmoid",
            exact_router=True,
            selection_bias=True,
            groups=fields.integer(f"{name}.expert_group_count", 1, limit=4096),
            chosen_groups=fields.integer(f"{name}.expert_group_used_count", 1, limit=4096),
            group_best=2,
            scale=fields.number(f"{name}.expert_weights_scale", 1.0),
            shared=shared,
            latent=None if latent is None else fields.integer(f"{name}.moe_latent_size"),
            latent_bias=any(tensor.endswith(".ffn_latent_down.bias") for tensor in config.tensors),
        )
    )


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer. Raises ModelError."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((name for name in names if fields.raw.get(name) is not None), names[0])
    given = fields.raw.get(key)
    if not isinstance(given, list | str) or not given or any(str(kind) not in _KINDS for kind in given):
        raise ModelError(
            f"{key} in {fields.where} is {str(given)[:60]!r}; it must name the kind of each layer: "
            "linear_attention, full_attention, mlp or moe."
        )
    return [_KINDS[str(kind)] for kind in given]


def _attention(fields: Fields) -> Attention:
    heads = fields.integer("num_attention_heads", 32)
    found = Attention(heads, fields.integer("num_key_value_heads", heads), fields.integer("head_dim", 128))
    check_heads(found.heads, found.kv_heads, found.head_dim)
    return found


def _mamba2(fields: Fields, norm: Norm) -> Mamba2:
    bias, least = fields.flag("use_bias"), fields.number("time_step_min", _LEAST_STEP)
    return checked(
        Mamba2(
            fields.integer("mamba_num_heads", 128),
            fields.integer("mamba_head_dim", 64),
            fields.integer("ssm_state_size", 128),
            fields.integer("n_groups", 8),
            fields.integer("conv_kernel", 4, limit=1024),
            fields.flag("use_conv_bias", True),
            in_bias=bias,
            out_bias=bias,
            step_limits=(least, inf),
            norm_eps=norm.eps,
        )
    )


def _feed(fields: Fields, key: str, usual: int) -> FeedForward:
    return FeedForward(fields.integer(key, usual), "relu2", gated=False, bias=fields.flag("mlp_bias"))


def _experts(fields: Fields) -> Experts:
    latent = None if fields.raw.get("moe_latent_size") is None else fields.integer("moe_latent_size")
    return check_experts(
        Experts(
            fields.integer("n_routed_experts", 8, limit=4096),
            fields.integer("num_experts_per_tok", 2),
            FeedForward(fields.integer("moe_intermediate_size", 7_688), "relu2", gated=False),
            renormalise=fields.flag("norm_topk_prob", True),
            scoring="sigmoid",
            exact_router=True,
            selection_bias=True,
            groups=fields.integer("n_group", 1, limit=4096),
            chosen_groups=fields.integer("topk_group", 1, limit=4096),
            group_best=2,
            scale=fields.number("routed_scaling_factor", 1.0),
            shared=_feed(fields, "moe_shared_expert_intermediate_size", 7_688),
            latent=latent,
            latent_bias=latent is not None and fields.flag("mlp_bias"),
        )
    )


_MIXER = {part: name.replace("mamba.", "mixer.") for part, name in MAMBA2_NAMES.items()}

FAMILY = Family(
    architectures=("NemotronHForCausalLM",),
    model_types=("nemotron_h",),
    from_hf=_from_hf,
    gguf_architecture="nemotron_h",
    from_gguf=partial(_from_gguf, name="nemotron_h"),
    gguf_names={
        **GGUF_NAMES,
        **MAMBA2_GGUF_NAMES,
        "feed_forward_norm": "attn_norm",
        "latent_in": "ffn_latent_down",
        "latent_out": "ffn_latent_up",
    },
    names={
        **NAMES,
        **_MIXER,
        "embedding": "backbone.embeddings",
        "layers": "backbone.layers.{}.",
        "attention_norm": "norm",
        "feed_forward_norm": "norm",
        "q": "mixer.q_proj",
        "k": "mixer.k_proj",
        "v": "mixer.v_proj",
        "out": "mixer.o_proj",
        "up": "mixer.up_proj",
        "down": "mixer.down_proj",
        "router": "mixer.gate",
        "selection_bias": "mixer.gate.e_score_correction_bias",
        "latent_in": "mixer.fc1_latent_proj",
        "latent_out": "mixer.fc2_latent_proj",
        "shared.up": "mixer.shared_experts.up_proj",
        "shared.down": "mixer.shared_experts.down_proj",
        "experts.up": "mixer.experts.{}.up_proj",
        "experts.down": "mixer.experts.{}.down_proj",
        "final_norm": "backbone.norm_f",
    },
    packed={"mixer.experts.up_proj": ("experts.up",), "mixer.experts.down_proj": ("experts.down",)},
    rename=lambda name: name.replace("model.", "backbone.", 1) if name.startswith("model.") else name,
    changes=MAMBA2_CHANGES,
)
SPARSE_GGUF = replace(
    FAMILY,
    architectures=(),
    model_types=(),
    gguf_architecture="nemotron_h_moe",
    from_gguf=partial(_from_gguf, name="nemotron_h_moe"),
)
"""GGUF files of those with experts."""
