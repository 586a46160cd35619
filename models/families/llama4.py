"""Llama 4, Scout and Maverick, text only: attention within chunks, layers without rotation, experts beside an MLP."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf, text_name
from models.families.experts import gguf_expert_layers, whole_numbers, with_experts
from models.families.family import NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rotated_layers
from models.spec import Experts, FeedForward, Layer, ModelSpec, Norm, QueryScaling, each_layer

_WITH_IMAGES = "Llama4ForConditionalGeneration"
_DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_CHUNK, _PERIOD, _BETA = 8192, 4, 0.1
"""What configs may leave out, and GGUF files always do: the size of a chunk, which is also the one from which queries
are scaled, one layer in how many has no rotation, and by how much its queries are scaled."""
_KINDS = ("chunked_attention", "full_attention")
_UNNORMED = 128
"""The number of experts of Maverick, which has no norms of heads; GGUF files do not say that."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    if architecture == _WITH_IMAGES:  # only its text model is run
        tied, fields = fields.flag("tie_word_embeddings"), fields.mapping("text_config")
        fields = fields.or_else(tie_word_embeddings=tied)
    fields = fields.or_else(**_DEFAULTS)
    size, dense = fields.integer("intermediate_size"), fields.integer("intermediate_size_mlp", 16_384)
    bias = fields.flag("attention_bias")
    fields = replace(fields, raw={**fields.raw, "intermediate_size": dense})
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias)
    layers = len(spec.layers)
    if not fields.raw.get("no_rope_layers"):
        fields = replace(fields, raw={**fields.raw, "no_rope_layers": None})
    rotated = rotated_layers(fields, layers, _PERIOD)
    scaling = None
    if fields.raw.get("attn_temperature_tuning") is not False:  # some configs have a number
        scaling = _scaling(fields.number("attn_scale", _BETA), fields.integer("floor_scale", _CHUNK))
    chunk = fields.integer("attention_chunk_size", _CHUNK)
    is_normed = fields.flag("use_qk_norm", True)
    spec = _llama4(spec, rotated, _chunked(fields, rotated), chunk, scaling, is_normed)
    step = fields.integer("interleave_moe_layer_step", 1)
    named = fields.raw.get("moe_layers") is not None
    sparse = whole_numbers(fields, "moe_layers") if named else range(step - 1, layers, step)
    count, chosen = (
        fields.integer("num_local_experts", 16, limit=4096),
        fields.integer("num_experts_per_tok", 1),
    )
    return with_experts(spec, _experts(count, chosen, size), sparse)


def _chunked(fields: Fields, rotated: list[bool]) -> list[bool]:
    """Return which layers attend within chunks: those in layer_types, otherwise those with rotation."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return rotated
    if not isinstance(kinds, list) or len(kinds) != len(rotated) or any(kind not in _KINDS for kind in kinds):
        raise ModelError(
            f"layer_types in {fields.where} is {str(kinds)[:60]!r}; it must name {len(rotated)} layers, each of them "
            f"{' or '.join(_KINDS)}."
        )
    return [kind == _KINDS[0] for kind in kinds]


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "llama4", config.fields
    spec = base_spec_of_gguf("Llama4ForCausalLM", name, config, experts=True)
    rotated = [(index + 1) % _PERIOD != 0 for index in range(len(spec.layers))]
    is_chunked = fields.raw.get(f"{name}.attention.sliding_window") != 0
    if not is_chunked:
        rotated = [True] * len(spec.layers)
    count = fields.integer(f"{name}.expert_count", limit=4096)
    chunked = rotated if is_chunked else [False] * len(spec.layers)
    spec = _llama4(spec, rotated, chunked, _CHUNK, _scaling(_BETA, _CHUNK), count != _UNNORMED)
    experts = _experts(
        count,
        fields.integer(f"{name}.expert_used_count"),
        fields.integer(f"{name}.expert_feed_forward_length"),
    )
    return with_experts(spec, experts, gguf_expert_layers(config, spec))


def _scaling(beta: float, positions: int) -> QueryScaling:
    return QueryScaling(beta, positions, offset=1)


def _experts(count: int, chosen: int, size: int) -> Experts:
    return Experts(
        count,
        chosen,
        FeedForward(size),
        renormalise=False,
        scoring="sigmoid",
        scales_inputs=True,
        shared=FeedForward(size),
    )


def _llama4(
    spec: ModelSpec,
    rotated: list[bool],
    chunked: list[bool],
    chunk: int,
    scaling: QueryScaling | None,
    is_normed: bool,
) -> ModelSpec:
    """Return `spec` with rotation and norms of heads in some layers, and scaled queries in the others."""
    norm = Norm(spec.final_norm.eps, weighted=False) if is_normed else None

    def changed(index: int, layer: Layer) -> Layer:
        attention = replace(
            layer.attention, chunk=chunk if chunked[index] and chunk < spec.max_positions else None
        )
        if not rotated[index]:
            return replace(layer, mixer=replace(attention, rope=None, query_scaling=scaling))
        assert attention.rope is not None
        rope = replace(attention.rope, interleaved=True, exact=True)
        attention = replace(attention, rope=rope, head_norm=norm, norms_rotated=norm is not None)
        return replace(layer, mixer=attention)

    return each_layer(spec, changed)


FAMILY = Family(
    architectures=("Llama4ForCausalLM", _WITH_IMAGES),
    model_types=("llama4_text", "llama4"),
    from_hf=_from_hf,
    gguf_architecture="llama4",
    from_gguf=_from_gguf,
    names={
        **NAMES,
        **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        "router": "feed_forward.router",
        **{f"shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        **{f"experts.{part}": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    },
    packed={
        "feed_forward.experts.gate_up_proj": ("experts.gate", "experts.up"),
        "feed_forward.experts.down_proj": ("experts.down",),
    },
    rename=text_name,
    turned=("experts.gate", "experts.up", "experts.down"),
)
