"""The compatibility check: which features of a network an executor lacks, in words for people.

It reads only the description and imports neither torch nor triton.
"""

from collections.abc import Iterable
from itertools import pairwise

from models.features import Feature, features, of_feed_forward
from models.recurrences import Mamba2, Recurrence
from models.spec import Attention, Experts, LatentAttention, ModelSpec, ShortConvolution

DRAFTS_NEED = "draft models need the native kernels of a CPU or the fused kernels of a GPU"
"""Why a draft model cannot be used here, as the end of a sentence."""
NATIVE = frozenset(
    {
        *(Feature.WINDOW, Feature.SCALE, Feature.SCORE_CAP, Feature.QUERY_SCALING, Feature.SINKS),
        *(Feature.GATE, Feature.HEAD_NORM, Feature.NORM_ALL_HEADS, Feature.NORM_ROTATED),
        *(Feature.QKV_BIAS, Feature.OUT_BIAS, Feature.VALUE_NORM, Feature.VALUE_IS_KEY),
        *(Feature.MIXED_HEADS, Feature.SHARED_KV, Feature.LATENT, Feature.CONVOLUTION, Feature.RECURRENCE),
        *(Feature.PARTIAL_ROPE, Feature.INTERLEAVED_ROPE, Feature.EXACT_ROPE, Feature.NO_ROPE),
        *(Feature.LEARNED_POSITIONS, Feature.MIXED_LAYERS, Feature.PARALLEL, Feature.LAYER_INPUTS),
        *(Feature.EXPERTS, Feature.EXACT_ROUTER, Feature.ROUTER_BIAS, Feature.SELECTION_BIAS),
        *(Feature.ROUTER_INPUT, Feature.EXPERT_GROUPS, Feature.EXPERT_SCALE, Feature.EXPERT_SCALES),
        *(Feature.EXPERT_NORMS, Feature.ACTIVATION, Feature.LEARNED_ACTIVATION, Feature.UNGATED),
        *(Feature.CLAMP, Feature.FEED_FORWARD_BIAS, Feature.LAYER_NORM, Feature.NORM_OFFSET),
        *(Feature.MIXED_EPS, Feature.NORM_PLACE, Feature.NORM_ROUNDING, Feature.RESIDUAL_SCALE),
        *(Feature.EMBEDDING_SCALE, Feature.LOGIT_SCALE, Feature.LOGIT_CAP, Feature.LAYER_SCALE),
        *(Feature.SQUARED_RELU, Feature.HALF_LAYERS, Feature.BESIDE),
    }
)
"""Features that the native CPU kernels compute. A feature that is not listed, such as a new one, is refused."""

FUSED = NATIVE - {
    Feature.LEARNED_POSITIONS,
    Feature.LEARNED_ACTIVATION,
    Feature.LAYER_NORM,
    Feature.PARALLEL,
    Feature.EXPERT_GROUPS,
}
"""Features that the fused GPU kernels compute."""

FUSED_HEADS = (64, 96, 128, 256, 512)
"""Head sizes that the fused GPU kernels support."""

FUSED_KEYS = (16, 32, 64, 128, 256)
"""Sizes of the keys of recurrences, which are B and C of Mamba-2, that the fused GPU kernels support."""

FUSED_VALUES = range(16, 129, 8)
"""Sizes of the values of a head of a recurrence, which are x of Mamba-2, that the fused GPU kernels support."""

NOT_WITH_EXPERTS = frozenset({Feature.LAYER_INPUTS})
"""Features in `FUSED` that the fused kernels lack when the network has experts."""

NOT_DIVIDED = frozenset(
    {
        Feature.NORM_ALL_HEADS,
        Feature.LAYER_SCALE,
        Feature.LAYER_INPUTS,
        Feature.EXPERT_NORMS,
        Feature.LATENT,
        Feature.HALF_LAYERS,
        Feature.BESIDE,
    }
)
"""Features in `FUSED` that the fused kernels lack when the network is divided among GPUs."""

DIVIDED = "it is divided among several processes"
"""Why kernels that know nothing of other ranks do not compute a network, as the middle of a sentence."""

ONE_ROW_FORMAT = frozenset(Feature) - {
    Feature.MIXED_HEADS,
    Feature.SHARED_KV,
    Feature.LATENT,
    Feature.RECURRENCE,
}
"""Features a network may have whose attention layers all have K and V of their own, of the same format."""

PLAIN_ATTENTION = ONE_ROW_FORMAT - {
    Feature.WINDOW,
    Feature.CHUNKS,
    Feature.SCALE,
    Feature.SCORE_CAP,
    Feature.SINKS,
    Feature.CONVOLUTION,
}
"""Features a network may have whose layers all attend by a plain softmax over all preceding rows."""


def lacking(spec: ModelSpec, supported: frozenset[Feature]) -> str | None:
    """Return the features of `spec` not in `supported`, worded as an object: "a sliding window and capped logits".

    Return None if nothing is missing.
    """
    return _listed(features(spec) - supported)


def _listed(found: Iterable[Feature]) -> str | None:
    words = sorted(feature.value for feature in found)
    if not words:
        return None
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def not_native(spec: ModelSpec) -> str | None:
    """Return why the native CPU kernels cannot run the network, as the middle of a sentence; None if they can."""
    if (lacks := lacking(spec, NATIVE)) is not None:
        return f"the native kernels do not support {lacks}"
    if spec.layer_inputs is not None and spec.layer_inputs.vocab_size is not None:
        return "the native kernels do not support embeddings for every layer of some tokens alone"
    for mixer in {layer.mixer for layer in spec.layers}:
        if isinstance(mixer, ShortConvolution):
            if mixer.size % 8:
                return f"there are no native kernels for convolutions of {mixer.size} channels"
        elif isinstance(mixer, LatentAttention):
            if mixer.kv_rank % 8 or mixer.rope_dim % 8:
                return (
                    f"there are no native kernels for latents of {mixer.kv_rank} + {mixer.rope_dim} numbers"
                )
        elif isinstance(mixer, Recurrence):
            rows, columns = mixer.state_shape[1:]
            if rows % 8 or columns % 8:
                return f"there are no native kernels for states of {rows} x {columns} numbers"
        elif isinstance(mixer, Attention) and mixer.head_dim % 8:
            return f"there are no native kernels for a head_dim of {mixer.head_dim}"
    if not _fit_beside(spec):
        return "the native kernels support two mixers beside each other only in layers without more"
    for layer in set(spec.layers):
        feed = layer.feed_forward
        if not isinstance(feed, Experts):
            continue
        if feed.shared_gate and (feed.router_norm or feed.shared_norm):
            return "the native kernels do not support a shared expert with a gate and a norm"
        if layer.parallel and (feed.expert_post_norm or feed.shared_post_norm):
            return "the native kernels do not support experts with norms beside the attention"
    return None


def _fit_beside(spec: ModelSpec) -> bool:
    """Return whether kernels can compute layers beside the ones before them, to whose results nothing is done."""
    for before, layer in pairwise((None, *spec.layers)):
        if layer is None or not layer.beside:
            continue
        if before is None or before.mixer is None or before.feed_forward is not None or before.beside:
            return False
        if before.scalar or spec.layer_inputs is not None or layer.mixer is None or layer.parallel:
            return False
    return True


def not_fused(spec: ModelSpec) -> str | None:
    """Return why the fused GPU kernels cannot run the network, as the middle of a sentence; None if they can."""
    if (lacks := lacking(spec, FUSED)) is not None:
        return f"the fused kernels do not support {lacks}"
    if has_experts(spec) and (lacks := lacking(spec, FUSED - NOT_WITH_EXPERTS)) is not None:
        return f"the fused kernels do not support {lacks} with experts"
    for attention in spec.attentions.values():
        if attention.head_dim not in FUSED_HEADS:
            return f"there are no fused kernels for a head_dim of {attention.head_dim}"
    for mixer in {layer.mixer for layer in spec.layers}:
        if isinstance(mixer, LatentAttention) and not _fits_latents(mixer):
            sizes = (
                f"{mixer.kv_rank} + {mixer.rope_dim} numbers, and heads of {mixer.nope_dim} and {mixer.v_dim}"
            )
            return f"there are no fused kernels for latent attention of {sizes}"
        if isinstance(mixer, Recurrence) and (reason := _not_fused_recurrence(mixer)) is not None:
            return reason
    if spec.layer_inputs is not None and spec.layer_inputs.vocab_size is not None:
        return "the fused kernels do not support embeddings for every layer of some tokens alone"
    if not _fit_beside(spec):
        return "the fused kernels support two mixers beside each other only in layers without more"
    return _not_fused_experts(spec)


def not_divided(spec: ModelSpec, ranks: int = 2) -> str | None:
    """Return why the fused kernels cannot divide the network among GPUs, besides `not_fused`; None if they can."""
    unknown = NOT_DIVIDED | {Feature.NORM_PLACE} if has_experts(spec) else NOT_DIVIDED
    if (lacks := _listed(features(spec) & unknown)) is not None:
        return f"the fused kernels do not support {lacks} that are divided among GPUs"
    for mixer in {layer.mixer for layer in spec.layers}:
        if isinstance(mixer, Mamba2) and mixer.norm_eps is not None and ranks >= 2 * mixer.groups:
            return "the fused kernels do not support norms of Mamba-2 heads that are on several GPUs"
    return None


def has_experts(spec: ModelSpec) -> bool:
    """Return whether any layer has a mixture of experts."""
    return any(isinstance(layer.feed_forward, Experts) for layer in spec.layers)


def not_on_host(spec: ModelSpec) -> str | None:
    """Return why native kernels cannot compute experts in host memory beside a GPU; None if they can."""
    feeds = {layer.feed_forward for layer in spec.layers}
    asked = {
        feature for feed in feeds if isinstance(feed, Experts) for feature in of_feed_forward(feed.expert)
    }
    if any(isinstance(feed, Experts) and feed.scales_inputs for feed in feeds):
        asked.add(Feature.EXPERT_INPUTS)
    if (lacks := _listed(asked - NATIVE)) is not None:
        return f"the native kernels do not support {lacks}"
    return None


def _fits_latents(spec: LatentAttention) -> bool:
    """Return whether there are fused kernels for latents of these sizes; they are cut into pieces as wide as keys."""
    sizes = spec.kv_rank % spec.rope_dim, spec.nope_dim % 16, spec.v_dim % 16
    return spec.rope_dim in (32, 64) and not any(sizes)


def _not_fused_recurrence(spec: Recurrence) -> str | None:
    """Return a limit of the fused kernels for recurrences that `Feature` does not express; None if there is none."""
    rows, columns = spec.state_shape[1:]
    keys, values = (columns, rows) if isinstance(spec, Mamba2) else (rows, columns)
    if keys not in FUSED_KEYS or values not in FUSED_VALUES:
        return f"there are no fused kernels for states of {rows} by {columns}"
    return None


def _not_fused_experts(spec: ModelSpec) -> str | None:
    """Return a limit of the fused expert kernels that `Feature` does not express; None if there is none."""
    for layer in spec.layers:
        feed = layer.feed_forward
        if not isinstance(feed, Experts):
            continue
        needed = {"router_norm", "expert_norm"} | ({"shared_norm"} if feed.shared is not None else set())
        if layer.feed_forward_norm is None and not needed <= feed.norms.keys():
            return "the fused kernels do not support experts without a norm before them"
        if spec.hidden_size % 8 or feed.expert.size % 8:
            return f"there are no fused kernels for experts of {spec.hidden_size} by {feed.expert.size}"
    return None


def by_torch(reason: str, multiplies: bool = False) -> str:
    """Say that PyTorch computes the network, because of `reason`; with `multiplies`, all but its products."""
    if multiplies:
        return f"native kernels for products and PyTorch for the rest: {reason}"
    return f"plain PyTorch, which is slower: {reason}"
