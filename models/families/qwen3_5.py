"""Qwen3.5, 3.6 and 3.8, dense and sparse, and Qwen3-Next: gated delta nets in most layers, and a gate for the output of
the attention in the others. Only the text model is run, without the layers that predict further tokens."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf, text_name
from models.families.experts import gguf_expert_layers, whole_numbers, with_experts
from models.families.family import GGUF_NAMES, GGUF_PACKED, NAMES, PACKED, Family, GGUFConfig
from models.families.fields import Fields
from models.families.layer_kinds import layer_kinds, with_mixer
from models.recurrences import DeltaNet
from models.spec import Experts, FeedForward, Layer, ModelSpec, each_layer

_RECURRENT = "linear_attention"
_PERIOD = 4
"""One layer in each period of this many has attention, where a config does not say."""


def _dense_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    return _from_hf(architecture, _text(fields))


def _sparse_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = _text(fields).or_else(num_experts=256, num_experts_per_tok=8, norm_topk_prob=True)
    spec = _from_hf(architecture, fields.or_else(intermediate_size=1))  # no layer has a dense feed-forward
    return with_experts(spec, _experts(fields), range(len(spec.layers)))


def _next_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = fields.or_else(num_experts=512, num_experts_per_tok=10)
    spec = _from_hf(architecture, fields)
    dense, step = whole_numbers(fields, "mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    sparse = [i for i in range(len(spec.layers)) if i not in dense and (i + 1) % step == 0]
    return with_experts(spec, _experts(fields), sparse)


def _text(fields: Fields) -> Fields:
    """Return the part of a config that describes the text model."""
    if "text_config" not in fields.raw:
        return fields
    tied = {key: fields.raw[key] for key in ("tie_word_embeddings",) if key in fields.raw}
    text = fields.mapping("text_config")
    return replace(text, raw={**text.raw, **tied})


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    """Return the network with a dense feed-forward in every layer."""
    if fields.flag("attention_bias"):
        raise ModelError(f"attention_bias in {fields.where} is true, which is not supported for this family.")
    fields = fields.or_else(partial_rotary_factor=0.25, num_key_value_heads=2)
    spec = base_spec(architecture, fields, head_dim=256, head_norm=True)
    layers, interval = len(spec.layers), fields.integer("full_attention_interval", _PERIOD)
    kinds = layer_kinds(fields, layers, (_RECURRENT, "full_attention"))
    recurrent = _but_each(interval, layers) if kinds is None else [kind == _RECURRENT for kind in kinds]
    net = DeltaNet(
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
        fields.integer("linear_conv_kernel_dim", 4, limit=1024),
        spec.final_norm.eps,
    )
    return _hybrid(spec, net, recurrent)


def _experts(fields: Fields) -> Experts:
    return Experts(
        fields.integer("num_experts", limit=4096),
        fields.integer("num_experts_per_tok"),
        FeedForward(fields.integer("moe_intermediate_size", 512)),
        renormalise=fields.flag("norm_topk_prob", True),
        shared=FeedForward(fields.integer("shared_expert_intermediate_size", 512)),
        shared_gate=True,
    )


def _dense_from_gguf(config: GGUFConfig) -> ModelSpec:
    return _from_gguf("Qwen3_5ForCausalLM", "qwen35", config)


def _sparse_from_gguf(config: GGUFConfig) -> ModelSpec:
    return _with_gguf_experts(_from_gguf("Qwen3_5MoeForCausalLM", "qwen35moe", config), "qwen35moe", config)


def _next_from_gguf(config: GGUFConfig) -> ModelSpec:
    return _with_gguf_experts(_from_gguf("Qwen3NextForCausalLM", "qwen3next", config), "qwen3next", config)


def _from_gguf(architecture: str, name: str, config: GGUFConfig) -> ModelSpec:
    """Return the network with a dense feed-forward in every layer."""
    fields = config.fields
    extra = fields.integer(f"{name}.nextn_predict_layers", 0, least=0, limit=1024)
    layers = fields.integer(f"{name}.block_count", limit=1024) - extra
    if layers < 1:
        raise ModelError(f"{name}.block_count in {fields.where} leaves no layer; download the file again.")
    changes = {f"{name}.block_count": layers}
    if name != "qwen35":
        changes[f"{name}.feed_forward_length"] = fields.raw.get(f"{name}.feed_forward_length") or 1
    config = replace(config, fields=replace(fields, raw={**fields.raw, **changes}))
    spec = base_spec_of_gguf(
        architecture, name, config, head_norm=True, partial=True, experts=name != "qwen35"
    )
    values = fields.integer(f"{name}.ssm.time_step_rank")
    inner = fields.integer(f"{name}.ssm.inner_size")
    if inner % values:
        raise ModelError(f"{name}.ssm.inner_size {inner} is not a multiple of {values}, the number of heads.")
    net = DeltaNet(
        fields.integer(f"{name}.ssm.group_count"),
        values,
        fields.integer(f"{name}.ssm.state_size"),
        inner // values,
        fields.integer(f"{name}.ssm.conv_kernel", limit=1024),
        spec.final_norm.eps,
        alternating=name != "qwen3next",
    )
    return _hybrid(spec, net, _but_each(fields.integer(f"{name}.full_attention_interval", _PERIOD), layers))


def _with_gguf_experts(spec: ModelSpec, name: str, config: GGUFConfig) -> ModelSpec:
    fields = config.fields
    size = fields.integer(f"{name}.expert_feed_forward_length")
    experts = Experts(
        fields.integer(f"{name}.expert_count", limit=4096),
        fields.integer(f"{name}.expert_used_count"),
        FeedForward(size),
        shared=FeedForward(fields.integer(f"{name}.expert_shared_feed_forward_length", size)),
        shared_gate=True,
    )
    return with_experts(spec, experts, gguf_expert_layers(config, spec))


def _but_each(interval: int, layers: int) -> list[bool]:
    """Return which layers are recurrent: all but the last in each interval."""
    return [(index + 1) % interval != 0 for index in range(layers)]


def _hybrid(spec: ModelSpec, net: DeltaNet, recurrent: list[bool]) -> ModelSpec:
    """Return `spec` with delta nets in some layers, gates for the attention of the others, and norms with offsets."""
    if net.value_heads % net.key_heads:
        raise ModelError(
            f"The config has {net.value_heads} value heads for {net.key_heads} key heads, not a multiple; it is "
            "damaged: download it again."
        )
    norm = replace(spec.final_norm, offset=1.0)

    def changed(_: int, layer: Layer) -> Layer:
        mixer = replace(layer.attention, head_norm=norm, gate="numbers")
        return replace(layer, mixer=mixer, attention_norm=norm, feed_forward_norm=norm)

    return replace(with_mixer(each_layer(spec, changed), net, recurrent), final_norm=norm)


def _name(name: str) -> str | None:
    """Return a tensor's name in a text-only model; None for those of pictures and of layers for further tokens."""
    if name.startswith(("mtp.", "model.visual.", "visual.")):
        return None
    return text_name(name)


_NAMES = {
    **NAMES,
    "attention_gate": "self_attn.gate_proj",  # in q_proj
    "delta_q": "linear_attn.q_proj",  # these in in_proj_qkv or in_proj_qkvz
    "delta_k": "linear_attn.k_proj",
    "delta_v": "linear_attn.v_proj",
    "delta_z": "linear_attn.in_proj_z",
    "delta_b": "linear_attn.in_proj_b",
    "delta_a": "linear_attn.in_proj_a",
    "filters": "linear_attn.conv1d",
    "dt_bias": "linear_attn.dt_bias",
    "decay": "linear_attn.A_log",
    "gated_norm": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
    "shared.gate": "mlp.shared_expert.gate_proj",
    "shared.up": "mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj",
    "shared_gate": "mlp.shared_expert_gate",
}
_Q, _QKV = "self_attn.q_proj.{field}", "linear_attn.in_proj_qkv.{field}"
_QKVZ, _BA = "linear_attn.in_proj_qkvz.{field}", "linear_attn.in_proj_ba.{field}"
_PARTS = ("delta_q", "delta_k", "delta_v", "delta_z")
_PACKED = {**PACKED, _Q: ("q", "attention_gate"), _QKV: _PARTS[:3]}
_CHANGES = {"decay": lambda stored: -stored.exp()}

_GGUF_NAMES = {
    **GGUF_NAMES,
    "feed_forward_norm": "post_attention_norm",
    "attention_gate": "attn_q_gate",  # in attn_q
    "delta_q": "attn_qkv_q",  # these in attn_qkv or ssm_in
    "delta_k": "attn_qkv_k",
    "delta_v": "attn_qkv_v",
    "delta_z": "attn_gate",
    "delta_b": "ssm_beta",
    "delta_a": "ssm_alpha",
    "filters": "ssm_conv1d",
    "dt_bias": "ssm_dt.bias",
    "decay": "ssm_a",
    "gated_norm": "ssm_norm",
    "delta_out": "ssm_out",
    "shared_gate": "ffn_gate_inp_shexp",
}
_GGUF_PACKED = {
    **GGUF_PACKED,
    "attn_q.{field}": ("q", "attention_gate"),
    "attn_qkv.{field}": _PARTS[:3],
    "ffn_gate_up_exps.{field}": ("experts.gate", "experts.up"),
}
_NO_OFFSETS = {
    part: (lambda stored: stored - 1.0)
    for part in ("attention_norm", "feed_forward_norm", "q_norm", "k_norm", "final_norm")
}
"""GGUF files add 1 to the weights of these norms."""

FAMILY = Family(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    model_types=("qwen3_5_text", "qwen3_5"),
    from_hf=_dense_from_hf,
    gguf_architecture="qwen35",
    from_gguf=_dense_from_gguf,
    names=_NAMES,
    gguf_names=_GGUF_NAMES,
    packed=_PACKED,
    gguf_packed=_GGUF_PACKED,
    rename=_name,
    alternating=(_Q,),
    gguf_alternating=("attn_q.{field}",),
    changes=_CHANGES,
    gguf_changes=_NO_OFFSETS,
)
SPARSE = replace(
    FAMILY,
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    from_hf=_sparse_from_hf,
    gguf_architecture="qwen35moe",
    from_gguf=_sparse_from_gguf,
)
NEXT = replace(
    FAMILY,
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    from_hf=_next_from_hf,
    gguf_architecture="qwen3next",
    from_gguf=_next_from_gguf,
    packed={**_PACKED, _QKVZ: _PARTS, _BA: ("delta_b", "delta_a")},
    gguf_packed={**_GGUF_PACKED, "ssm_in.{field}": _PARTS, "ssm_ba.{field}": ("delta_b", "delta_a")},
    alternating=(_Q, _QKVZ, _BA),
    gguf_alternating=("attn_q.{field}", "ssm_in.{field}", "ssm_ba.{field}"),
)
