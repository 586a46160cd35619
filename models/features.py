"""The features that a network requires beyond the plainest decoder: RMSNorm before each part, a gated SiLU
feed-forward, rotary positions over whole heads, softmax over all preceding rows."""

from enum import Enum

from models.recurrences import Recurrence
from models.spec import (
    Experts,
    FeedForward,
    LatentAttention,
    Mixer,
    ModelSpec,
    Norm,
    ShortConvolution,
    norms,
    same_heads,
)


class Feature(Enum):
    """A feature. Its value completes the sentence "this model has ..." that a user reads."""

    WINDOW = "a sliding window"
    CHUNKS = "attention within chunks"
    SCALE = "a scale of its own for attention scores"
    SCORE_CAP = "capped attention scores"
    QUERY_SCALING = "queries that are scaled by their positions"
    NEXT_POSITION = "queries that are scaled by the position after their own"
    SINKS = "attention sinks"
    GATE = "a gate for the attention's output"
    HEAD_NORM = "norms of query and key heads"
    NORM_ALL_HEADS = "norms of all query or key heads together"
    NORM_ROTATED = "norms of query and key heads after their rotation"
    VALUE_NORM = "norms of value heads"
    VALUE_IS_KEY = "values that are unrotated keys"
    QKV_BIAS = "biases of queries, keys and values"
    OUT_BIAS = "a bias of the attention's output"
    PARTIAL_ROPE = "heads that are only partly rotated"
    INTERLEAVED_ROPE = "interleaved rotary positions"
    EXACT_ROPE = "rotary positions that are computed in fp32"
    NO_ROPE = "layers without rotary positions"
    LEARNED_POSITIONS = "learned positions"
    EXPERTS = "a mixture of experts"
    EXACT_ROUTER = "a router that is computed in fp32"
    ROUTER_BIAS = "a bias of the router"
    SELECTION_BIAS = "a bias for the choice of experts"
    EXPERT_GROUPS = "experts that are chosen in groups"
    EXPERT_SCALE = "a scale for the chosen experts"
    ROUTER_INPUT = "a router with a norm or a scale of its own"
    EXPERT_INPUTS = "weights of experts that multiply their inputs"
    EXPERT_SCALES = "a scale for each expert"
    LATENT_EXPERTS = "experts that read projections of their inputs"
    EXPERT_NORMS = "norms of the chosen or shared experts alone"
    ACTIVATION = "an activation other than SiLU"
    SQUARED_RELU = "a squared ReLU"
    LEARNED_ACTIVATION = "an activation with learned parameters"
    UNGATED = "a feed-forward without a gate"
    SPARSE_GATE = "gates that are mostly 0"
    CLAMP = "a SiLU with a clamp, a gain or an offset"
    FEED_FORWARD_BIAS = "biases of the feed-forward"
    LAYER_NORM = "LayerNorm"
    NO_WEIGHT = "norms without weights"
    NORM_OFFSET = "norm weights stored as offsets"
    MIXED_EPS = "norms with different epsilons"
    PARALLEL = "attention beside the feed-forward"
    NORM_PLACE = "norms elsewhere than before attention and feed-forward"
    NORM_ROUNDING = "norms that are rounded after their weight"
    RESIDUAL_SCALE = "scaled residuals"
    LAYER_SCALE = "scaled layers"
    LAUREL = "residuals of low rank"
    STREAMS = "several residual streams"
    LAYER_INPUTS = "embeddings for every layer"
    EMBEDDING_NORM = "a norm of the embeddings"
    EMBEDDING_SCALE = "scaled embeddings"
    LOGIT_SCALE = "scaled logits"
    LOGIT_CAP = "capped logits"
    MIXED_LAYERS = "layers that differ from each other"
    MIXED_HEADS = "attention heads that differ from layer to layer"
    SHARED_KV = "layers that read the keys and values of other layers"
    LATENT = "multi-head latent attention"
    CONVOLUTION = "short convolutions in place of attention"
    RECURRENCE = "recurrent layers"
    BESIDE = "mixers beside each other"
    HALF_LAYERS = "layers without attention or without a feed-forward"


def features(spec: ModelSpec) -> frozenset[Feature]:
    """Return every feature that `spec` requires."""
    found = {
        Feature.LEARNED_POSITIONS: spec.learned_positions,
        Feature.STREAMS: spec.altup is not None,
        Feature.LAYER_INPUTS: spec.layer_inputs is not None,
        Feature.EMBEDDING_NORM: spec.embedding_norm is not None,
        Feature.EMBEDDING_SCALE: spec.embedding_scale != 1.0,
        Feature.LOGIT_SCALE: spec.logit_scale != 1.0,
        Feature.LOGIT_CAP: spec.logit_cap is not None,
        Feature.MIXED_LAYERS: len(set(spec.layers)) > 1,
        Feature.MIXED_HEADS: not same_heads(spec),
        Feature.MIXED_EPS: len({norm.eps for norm in norms(spec)}) > 1,
    }
    asked = _true(found)
    for layer in set(spec.layers):
        parts = (layer.mixer, layer.feed_forward)
        before = (layer.attention_norm, layer.attention_norm if layer.parallel else layer.feed_forward_norm)
        is_bare = (
            any(part and norm is None for part, norm in zip(parts, before, strict=True)) and not layer.beside
        )
        after = (layer.attention_post_norm, layer.feed_forward_post_norm)
        asked |= _true(
            {
                Feature.RESIDUAL_SCALE: layer.residual_scale != 1.0,
                Feature.LAYER_SCALE: layer.scalar,
                Feature.LAUREL: layer.laurel is not None,
                Feature.PARALLEL: layer.parallel,
                Feature.BESIDE: layer.beside,
                Feature.NORM_PLACE: is_bare or after != (None, None),
            }
        )
        asked |= _of_mixer(layer.mixer) | of_feed_forward(layer.feed_forward)
    return frozenset(asked.union(*map(_of_norm, norms(spec))))


def _of_mixer(spec: Mixer | None) -> set[Feature]:
    if spec is None:
        return {Feature.HALF_LAYERS}
    if isinstance(spec, ShortConvolution):
        return {Feature.CONVOLUTION}
    if isinstance(spec, Recurrence):
        return {Feature.RECURRENCE}
    if isinstance(spec, LatentAttention):
        return {Feature.LATENT}
    rope = spec.rope
    found = {
        Feature.WINDOW: spec.window is not None,
        Feature.CHUNKS: spec.chunk is not None,
        Feature.SCALE: spec.scale is not None,
        Feature.SCORE_CAP: spec.score_cap is not None,
        Feature.QUERY_SCALING: spec.query_scaling is not None,
        Feature.NEXT_POSITION: spec.query_scaling is not None and spec.query_scaling.offset != 0,
        Feature.SINKS: spec.sinks,
        Feature.GATE: spec.gate is not None,
        Feature.SHARED_KV: spec.kv_from is not None,
        Feature.HEAD_NORM: spec.head_norm is not None,
        Feature.NORM_ALL_HEADS: spec.norms_all_heads,
        Feature.NORM_ROTATED: spec.norms_rotated,
        Feature.VALUE_NORM: spec.v_norm is not None,
        Feature.VALUE_IS_KEY: spec.v_is_k,
        Feature.QKV_BIAS: spec.qkv_bias,
        Feature.OUT_BIAS: spec.out_bias,
        Feature.NO_ROPE: rope is None,
        Feature.PARTIAL_ROPE: rope is not None and rope.dims not in (None, spec.head_dim),
        Feature.INTERLEAVED_ROPE: rope is not None and rope.interleaved,
        Feature.EXACT_ROPE: rope is not None and rope.exact,
    }
    return _true(found)


def of_feed_forward(spec: FeedForward | Experts | None) -> set[Feature]:
    """Return the features that a feed-forward requires."""
    if spec is None:
        return {Feature.HALF_LAYERS}
    if isinstance(spec, Experts):
        shared = of_feed_forward(spec.shared) if spec.shared is not None else set()
        choice = {
            Feature.EXACT_ROUTER: spec.exact_router,
            Feature.ROUTER_BIAS: spec.router_bias,
            Feature.SELECTION_BIAS: spec.selection_bias,
            Feature.EXPERT_GROUPS: spec.groups > 1,
            Feature.EXPERT_SCALE: spec.scale != 1.0,
            Feature.ROUTER_INPUT: (spec.router_norm, spec.router_scale) != (None, 1.0),
            Feature.EXPERT_INPUTS: spec.scales_inputs,
            Feature.EXPERT_SCALES: spec.expert_scales,
            Feature.LATENT_EXPERTS: spec.latent is not None,
            Feature.EXPERT_NORMS: bool(spec.norms.keys() - {"router_norm"}),
        }
        return {Feature.EXPERTS} | _true(choice) | of_feed_forward(spec.expert) | shared
    found = {
        Feature.ACTIVATION: spec.activation != "silu",
        Feature.LEARNED_ACTIVATION: spec.activation == "xielu",
        Feature.SQUARED_RELU: spec.activation == "relu2",
        Feature.UNGATED: not spec.gated,
        Feature.SPARSE_GATE: spec.cutoff is not None,
        Feature.CLAMP: (spec.limit, spec.gain, spec.up_offset) != (None, 1.0, 0.0),
        Feature.FEED_FORWARD_BIAS: spec.bias,
    }
    return _true(found)


def _of_norm(norm: Norm) -> set[Feature]:
    return _true(
        {
            Feature.LAYER_NORM: norm.kind == "layer" or norm.bias,
            Feature.NO_WEIGHT: not norm.weighted,
            Feature.NORM_OFFSET: norm.offset != 0.0,
            Feature.NORM_ROUNDING: norm.rounds_last,
        }
    )


def _true(found: dict[Feature, bool]) -> set[Feature]:
    return {feature for feature, is_asked in found.items() if is_asked}
