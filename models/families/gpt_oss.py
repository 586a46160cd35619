"""gpt-oss: experts with a clamped activation, biases everywhere, attention sinks, a window in every other layer."""

from dataclasses import replace

from models.families.common import base_spec, base_spec_of_gguf
from models.families.experts import with_experts
from models.families.family import GGUF_NAMES, NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.windows import windows
from models.spec import Experts, FeedForward, ModelSpec, each_layer

_GAIN, _LIMIT = 1.702, 7.0
_WINDOW = 128
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = fields.or_else(rope_theta=150_000.0, rms_norm_eps=1e-5, rope_parameters=_YARN)
    bias = fields.flag("attention_bias", True)
    spec = base_spec(architecture, fields, head_dim=64, qkv_bias=bias, out_bias=bias)
    spec = windows(spec, fields, fields.raw.get("sliding_window", _WINDOW), _sliding(len(spec.layers)))
    return _whole(
        spec,
        fields.integer("num_local_experts", fields.integer("num_experts", 128, limit=4096), limit=4096),
        fields.integer("num_experts_per_tok", 4),
        fields.integer("intermediate_size"),
        fields.number("swiglu_alpha", _GAIN),
        fields.number("swiglu_limit", _LIMIT),
    )


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "gpt-oss", config.fields
    pattern = _sliding(fields.integer(f"{name}.block_count", limit=1024))
    fields = fields.or_else(**{f"{name}.attention.sliding_window_pattern": pattern})
    spec = base_spec_of_gguf("GptOssForCausalLM", name, replace(config, fields=fields), experts=True)
    return _whole(
        spec,
        fields.integer(f"{name}.expert_count", limit=4096),
        fields.integer(f"{name}.expert_used_count"),
        fields.integer(f"{name}.expert_feed_forward_length"),
        _GAIN,
        _LIMIT,
        truncate=False,
    )


def _sliding(layers: int) -> list[bool]:
    """Return which layers have a window: every other one, beginning with the first."""
    return [index % 2 == 0 for index in range(layers)]


def _whole(
    spec: ModelSpec,
    count: int,
    chosen: int,
    size: int,
    gain: float,
    limit: float,
    truncate: bool | None = None,
) -> ModelSpec:
    """Return `spec` with experts and sinks; `truncate` is as in `Rope`, None leaves it unchanged."""
    norm = replace(spec.final_norm, rounds_last=True)
    rope = spec.attention.rope
    assert rope is not None
    rope = rope if truncate is None else replace(rope, truncate=truncate)
    spec = each_layer(
        spec,
        lambda _, layer: replace(
            layer,
            mixer=replace(layer.attention, sinks=True, rope=rope),
            attention_norm=norm,
            feed_forward_norm=norm,
        ),
    )
    expert = FeedForward(size, bias=True, gain=gain, limit=limit, up_offset=1.0)
    experts = Experts(count, chosen, expert, router_bias=True)
    return with_experts(replace(spec, final_norm=norm), experts, range(len(spec.layers)))


def _name(name: str) -> str:
    """Add a field to the names of the tensors that hold all experts, which have none."""
    for part in ("gate_up_proj", "down_proj"):
        at = f"mlp.experts.{part}"
        if name.endswith((at, f"{at}_bias")):
            return (
                name.replace(f"{part}_bias", f"{part}.bias") if name.endswith("_bias") else f"{name}.weight"
            )
    return name


FAMILY = Family(
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    from_hf=_from_hf,
    gguf_architecture="gpt-oss",
    from_gguf=_from_gguf,
    names={**NAMES, "router": "mlp.router", "sinks": "self_attn.sinks"},
    gguf_names={**GGUF_NAMES, "feed_forward_norm": "post_attention_norm"},
    packed={
        "mlp.experts.gate_up_proj.{field}": ("experts.gate", "experts.up"),
        "mlp.experts.down_proj.{field}": ("experts.down",),
    },
    rename=_name,
    turned=("experts.gate", "experts.up", "experts.down"),
    alternating=("mlp.experts.gate_up_proj.{field}",),
)
