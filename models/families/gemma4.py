"""Gemma 4, text only: attention of two shapes, shared keys and values, inputs for each layer, experts beside an MLP."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf, check_heads, text_name
from models.families.experts import with_experts
from models.families.family import GGUF_NAMES, GGUF_PACKED, NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_from_part, unscaled_of_gguf
from models.families.windows import but_last_of_each, sliding_layers
from models.spec import Attention, Experts, FeedForward, Layer, LayerInputs, ModelSpec, Norm, each_layer

_WITH_IMAGES = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
_UNIFIED = ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM")
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
_PERIOD = 6
"""One layer in each period of this many sees all tokens, where a config does not say."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    if architecture in _WITH_IMAGES:  # only its text model is run
        tied, fields = fields.flag("tie_word_embeddings", True), fields.mapping("text_config")
        fields = fields.or_else(tie_word_embeddings=tied)
    is_unified = architecture in _UNIFIED
    fields = fields.or_else(
        **_DEFAULTS,
        max_position_embeddings=262_144 if is_unified else 131_072,
        sliding_window=1024 if is_unified else 512,
    )
    raw = fields.raw
    check_activation(fields)
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise ModelError(f"{fields.where} requires attention to later tokens, which is not supported.")
    bias = fields.flag("attention_bias")
    plain = {key: value for key, value in raw.items() if key != "hidden_act" and "rope" not in key}
    spec = base_spec(architecture, replace(fields, raw=plain), qkv_bias=bias, out_bias=bias)
    layers, shared = len(spec.layers), fields.integer("num_kv_shared_layers", 0, least=0)
    local = sliding_layers(spec, fields, but_last_of_each(_PERIOD, layers))
    local[-1] = False
    size = fields.integer("intermediate_size")
    doubled = fields.flag("use_double_wide_mlp")
    sizes = [size * (2 if doubled and index >= layers - shared else 1) for index in range(layers)]
    experts = None
    if not is_unified and fields.flag("enable_moe_block"):
        count, chosen = fields.integer("num_experts", limit=4096), fields.integer("top_k_experts")
        experts = _experts(spec, count, chosen, fields.integer("moe_intermediate_size"))
    has_inputs = not is_unified and raw.get("hidden_size_per_layer_input", 256) is not None
    inputs = fields.integer("hidden_size_per_layer_input", 256, least=0) if has_inputs else 0
    if inputs and fields.integer("vocab_size_per_layer_input", spec.vocab_size) != spec.vocab_size:
        raise ModelError(
            f"vocab_size_per_layer_input in {fields.where} is {raw['vocab_size_per_layer_input']}, not vocab_size "
            f"({spec.vocab_size}), which is not supported."
        )
    spec = replace(spec, logit_cap=fields.number_or_none("final_logit_softcapping"))
    return _gemma4(spec, _attentions(spec, fields, local), local, sizes, shared, experts, inputs)


def _attentions(spec: ModelSpec, fields: Fields, local: Sequence[bool]) -> list[Attention]:
    """Return the attention of each layer, before any is shared."""
    base, is_own = spec.attention, fields.flag("attention_k_eq_v")
    whole_kv = fields.integer("num_global_key_value_heads", base.kv_heads) if is_own else base.kv_heads
    whole = {"head_dim": fields.integer("global_head_dim", 512), "num_key_value_heads": whole_kv}
    usual = whole if fields.raw.get("per_layer_config") is None else {}
    window = fields.integer("sliding_window")
    ropes, changes = fields.mapping("rope_parameters"), fields.mapping("per_layer_config")
    beside = replace(fields, raw={"max_position_embeddings": spec.max_positions})
    # transformers writes the numbers of layers with as many digits as the last one has: "04".
    keys = {int(key): key for key in changes.raw if key.isdecimal()}
    found = []
    for index, is_local in enumerate(local):
        own = changes.mapping(keys.get(index, str(index)))
        if other := next((key for key in own.raw if key not in whole), None):
            raise ModelError(f"{own.where} changes {other[:60]}, which is not supported.")
        own = replace(own, raw={} if is_local else usual) if not own.raw else own
        dim = own.integer("head_dim", base.head_dim)
        kv_heads = own.integer("num_key_value_heads", base.kv_heads)
        check_heads(base.heads, kv_heads, dim)
        rope = rope_from_part(
            ropes.mapping("sliding_attention" if is_local else "full_attention"), beside, dim
        )
        found.append(
            replace(
                base,
                kv_heads=kv_heads,
                head_dim=dim,
                rope=rope,
                window=window if is_local and window < spec.max_positions else None,
                v_is_k=is_own and not is_local,
            )
        )
    return found


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "gemma4", config.fields
    layers = fields.integer(f"{name}.block_count", limit=1024)
    local = fields.raw.get(f"{name}.attention.sliding_window_pattern")
    if not isinstance(local, list) or len(local) != layers:
        raise ModelError(
            f"{name}.attention.sliding_window_pattern in {fields.where} must say for each of the {layers} layers "
            "whether it has a window."
        )
    local = [bool(slides) for slides in local]
    kv_heads, sizes = (
        by_layer(fields, f"{name}.{key}", layers)
        for key in ("attention.head_count_kv", "feed_forward_length")
    )
    first = {f"{name}.attention.head_count_kv": kv_heads[0], f"{name}.feed_forward_length": sizes[0]}
    config = config.with_fields(first)
    spec = base_spec_of_gguf("Gemma4ForCausalLM", name, config, experts=True)
    dim = fields.integer(f"{name}.attention.key_length_swa", spec.attention.head_dim)
    for key in (f"{name}.attention.value_length_swa", f"{name}.rope.dimension_count_swa"):
        if fields.integer(key, dim) != dim:
            raise ModelError(f"{key} is {fields.raw[key]}, not the head size {dim}, which is not supported.")
    rope = unscaled_of_gguf(fields, name, fields.number(f"{name}.rope.freq_base_swa", 10_000.0))
    attentions = []
    for index, (layer, is_local) in enumerate(zip(spec.layers, local, strict=True)):
        v_is_k = f"blk.{index}.attn_v.weight" not in config.tensors
        attention = replace(layer.attention, kv_heads=kv_heads[index], v_is_k=v_is_k)
        attentions.append(replace(attention, head_dim=dim, rope=rope) if is_local else attention)
        check_heads(attention.heads, kv_heads[index], dim)
    count = fields.integer(f"{name}.expert_count", 0, least=0, limit=4096)
    experts = None
    if count:
        chosen = fields.integer(f"{name}.expert_used_count")
        experts = _experts(spec, count, chosen, fields.integer(f"{name}.expert_feed_forward_length"))
    spec = replace(spec, logit_cap=fields.number_or_none(f"{name}.final_logit_softcapping"))
    shared = fields.integer(f"{name}.attention.shared_kv_layers", 0, least=0)
    inputs = fields.integer(f"{name}.embedding_length_per_layer_input", 0, least=0)
    return _gemma4(spec, attentions, local, sizes, shared, experts, inputs)


def check_activation(fields: Fields) -> None:
    """Raise ModelError unless the activation is the one of all Gemmas."""
    if (given := fields.raw.get("hidden_activation")) not in (None, "gelu_pytorch_tanh"):
        raise ModelError(
            f"hidden_activation {str(given)[:60]} in {fields.where} is not supported; supported: gelu_pytorch_tanh."
        )


def by_layer(fields: Fields, key: str, layers: int) -> list[int]:
    """Return a whole number for each layer, from a list or from one number for all."""
    given = fields.raw.get(key)
    if not isinstance(given, list) or len(given) != layers:
        return [fields.integer(key)] * layers
    return [Fields({key: value}, fields.where).integer(key) for value in given]


def _experts(spec: ModelSpec, count: int, chosen: int, size: int) -> Experts:
    """Return the experts, without the MLP beside them; the router sees norm(x) * weight * hidden_size ** -0.5."""
    norm = rounded_norm(spec)
    return Experts(
        count,
        chosen,
        FeedForward(size, "gelu_tanh"),
        router_norm=replace(norm, rounds_last=False),
        router_scale=spec.hidden_size**-0.5,
        expert_scales=True,
        expert_norm=norm,
        expert_post_norm=norm,
        shared_norm=norm,
        shared_post_norm=norm,
    )


def _gemma4(
    spec: ModelSpec,
    attentions: Sequence[Attention],
    local: Sequence[bool],
    sizes: Sequence[int],
    shared: int,
    experts: Experts | None,
    inputs: int,
) -> ModelSpec:
    """Return the network: the last `shared` layers read the keys and values of the last layer of their kind before."""
    norm, sources = rounded_norm(spec), kv_givers(local, shared)

    def layer(index: int, given: Layer) -> Layer:
        mlp = FeedForward(sizes[index], "gelu_tanh")
        mixture = given.feed_forward
        feed = replace(mixture, shared=mlp) if isinstance(mixture, Experts) else mlp
        attention = replace(attentions[index], scale=1.0, head_norm=norm)
        if sources[index] is None:
            attention = replace(attention, v_norm=Norm(norm.eps))
        else:
            attention = replace(attention, v_is_k=False, kv_from=sources[index])
        before = None if experts is not None else norm
        return Layer(attention, feed, norm, norm, before, norm, scalar=True)

    if experts is not None:
        spec = with_experts(spec, experts, range(len(local)))
    return replace(
        each_layer(spec, layer),
        final_norm=norm,
        embedding_scale=spec.hidden_size**0.5,
        layer_inputs=LayerInputs(inputs, norm=norm, post_norm=norm) if inputs else None,
    )


def kv_givers(local: Sequence[bool], shared: int) -> list[int | None]:
    """Return for each of the last `shared` layers the last layer of its kind before them, None for the others.

    `local` says which layers have a window. Raises ModelError if there is no such layer.
    """
    own = len(local) - shared
    givers = {is_local: index for index, is_local in enumerate(local[: max(own, 0)])}
    if missing := set(local) - givers.keys():
        kind = "with" if missing.pop() else "without"
        raise ModelError(
            f"The last {shared} of {len(local)} layers share keys and values, but no layer {kind} a window has any; "
            "the config is damaged: download it again."
        )
    return [None if index < own else givers[is_local] for index, is_local in enumerate(local)]


def rounded_norm(spec: ModelSpec) -> Norm:
    """Return the norm of `spec`, rounded after its weight as in all Gemmas."""
    return replace(spec.final_norm, rounds_last=True)


_EXPERTS = {
    "router": "router.proj",
    **{f"experts.{part}": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    "router_norm": "router.scale",
    "expert_scales": "router.per_expert_scale",
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_post_norm": "post_feedforward_layernorm_2",
    "shared_norm": "pre_feedforward_layernorm",
    "shared_post_norm": "post_feedforward_layernorm_1",
    **{f"shared.{part}": NAMES[part] for part in ("gate", "up", "down")},
}
_GGUF_EXPERTS = {
    "router_norm": "ffn_gate_inp.scale",
    "expert_scales": "ffn_down_exps.scale",
    "expert_norm": "pre_ffw_norm_2",
    "expert_post_norm": "post_ffw_norm_2",
    "shared_norm": GGUF_NAMES["feed_forward_norm"],
    "shared_post_norm": "post_ffw_norm_1",
    **{f"shared.{part}": GGUF_NAMES[part] for part in ("gate", "up", "down")},
}
FAMILY = Family(
    architectures=(
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    ),
    model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
    from_hf=_from_hf,
    gguf_architecture="gemma4",
    from_gguf=_from_gguf,
    names={
        **NAMES,
        **_EXPERTS,
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
        "scalar": "layer_scalar",
        "layer_embedding": "model.embed_tokens_per_layer",
        "layer_projection": "model.per_layer_model_projection",
        "layer_input_norm": "model.per_layer_projection_norm",
        "input_gate": "per_layer_input_gate",
        "input_out": "per_layer_projection",
        "input_post_norm": "post_per_layer_input_norm",
    },
    gguf_names={
        **GGUF_NAMES,
        **_GGUF_EXPERTS,
        "scalar": "layer_output_scale.weight",
        "layer_embedding": "per_layer_token_embd",
        "layer_projection": "per_layer_model_proj",
        "layer_input_norm": "per_layer_proj_norm",
        "input_gate": "inp_gate",
        "input_out": "proj",
        "input_post_norm": "post_norm",
    },
    packed={
        "experts.gate_up_proj": ("experts.gate", "experts.up"),
        "experts.down_proj": ("experts.down",),
    },
    gguf_packed={**GGUF_PACKED, "ffn_gate_up_exps.{field}": ("experts.gate", "experts.up")},
    rename=text_name,
)
