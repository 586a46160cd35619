"""The compatibility check: what an executor cannot do of a network, feature by feature, in words for people.

It reads the description alone, and imports neither torch nor triton.
"""

import os
from collections.abc import Iterable

from models.features import Feature, features, of_feed_forward
from models.spec import Experts, ModelSpec

DRAFTS_NEED = "draft models need the native kernels of a CPU or the fused kernels of a GPU"
"""Why there is none, as the end of a sentence."""
NATIVE = frozenset(
    {
        Feature.WINDOW,
        Feature.SCALE,
        Feature.SCORE_CAP,
        Feature.SINKS,
        Feature.HEAD_NORM,
        Feature.NORM_ALL_HEADS,
        Feature.QKV_BIAS,
        Feature.OUT_BIAS,
        Feature.PARTIAL_ROPE,
        Feature.INTERLEAVED_ROPE,
        Feature.EXACT_ROPE,
        Feature.NO_ROPE,
        Feature.LEARNED_POSITIONS,
        Feature.EXPERTS,
        Feature.EXACT_ROUTER,
        Feature.ROUTER_BIAS,
        Feature.SELECTION_BIAS,
        Feature.ACTIVATION,
        Feature.UNGATED,
        Feature.CLAMP,
        Feature.FEED_FORWARD_BIAS,
        Feature.LAYER_NORM,
        Feature.NORM_OFFSET,
        Feature.MIXED_EPS,
        Feature.NORM_PLACE,
        Feature.NORM_ROUNDING,
        Feature.RESIDUAL_SCALE,
        Feature.EMBEDDING_SCALE,
        Feature.LOGIT_SCALE,
        Feature.LOGIT_CAP,
        Feature.MIXED_LAYERS,
    }
)
"""What the native kernels of a CPU compute. What is not listed is refused, so that a new feature is."""

FUSED = NATIVE - {Feature.LEARNED_POSITIONS, Feature.UNGATED, Feature.LAYER_NORM}
"""What the fused kernels of a GPU compute."""

FUSED_HEADS = (64, 96, 128, 256)
"""And the sizes of heads that they know."""

NOT_WITH_EXPERTS = frozenset({Feature.NORM_PLACE, Feature.NORM_OFFSET})
"""What the kernels for experts do not know of that."""

DIVIDED = "it is divided among several processes"
"""Why kernels that know nothing of other ranks do not compute a network, as the middle of a sentence."""
PARTS_ARE_FUSED = os.environ.get("CHATTERM_FUSED_PARTS") == "1"
"""Whether a network that is divided is computed by fused kernels: usually not before that was seen to work on GPUs. The
other ranks find it in their environment, too."""

PLAIN_ATTENTION = frozenset(Feature) - {Feature.WINDOW, Feature.SCALE, Feature.SCORE_CAP, Feature.SINKS}
"""What there may be in a network whose attention is a plain softmax over all rows before."""


def lacking(spec: ModelSpec, supported: frozenset[Feature]) -> str | None:
    """What of `spec` is not among `supported`, as the object of a sentence: "a sliding window and capped logits".

    None where nothing is lacking.
    """
    return _listed(features(spec) - supported)


def _listed(found: Iterable[Feature]) -> str | None:
    words = sorted(feature.value for feature in found)
    if not words:
        return None
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def not_native(spec: ModelSpec) -> str | None:
    """Why the native kernels of a CPU cannot run such a network, as the middle of a sentence; None if they can."""
    if (lacks := lacking(spec, NATIVE)) is not None:
        return f"the native kernels do not support {lacks}"
    dim = spec.attention.head_dim
    return f"there are no native kernels for a head_dim of {dim}" if dim % 8 else None


def not_fused(spec: ModelSpec) -> str | None:
    """The same of the fused kernels of a GPU."""
    known = FUSED - NOT_WITH_EXPERTS if has_experts(spec) else FUSED
    if (lacks := lacking(spec, known)) is not None:
        return f"the fused kernels do not support {lacks}{' with experts' if known < FUSED else ''}"
    dim = spec.attention.head_dim
    if dim not in FUSED_HEADS:
        return f"there are no fused kernels for a head_dim of {dim}"
    return _not_fused_experts(spec)


def not_divided(spec: ModelSpec) -> str | None:
    """What the fused kernels do not know of a network that several GPUs compute together, beside `not_fused`."""
    if not PARTS_ARE_FUSED:
        return DIVIDED
    if any(layer.attention.norms_all_heads for layer in spec.layers):
        return f"the fused kernels do not support {Feature.NORM_ALL_HEADS.value} that are divided among GPUs"
    return None


def has_experts(spec: ModelSpec) -> bool:
    """Whether some layer has a mixture of experts."""
    return any(isinstance(layer.feed_forward, Experts) for layer in spec.layers)


def not_on_host(spec: ModelSpec) -> str | None:
    """Why experts in host memory cannot be computed by the native kernels while a GPU computes the rest."""
    feeds = {layer.feed_forward for layer in spec.layers}
    asked = {
        feature for feed in feeds if isinstance(feed, Experts) for feature in of_feed_forward(feed.expert)
    }
    if (lacks := _listed(asked - NATIVE)) is not None:
        return f"the native kernels do not support {lacks}"
    return None


def _not_fused_experts(spec: ModelSpec) -> str | None:
    """What the kernels for experts do not know and `Feature` does not tell."""
    for feed in {layer.feed_forward for layer in spec.layers}:
        if not isinstance(feed, Experts):
            continue
        if feed.shared_gate:
            return "the fused kernels do not support a shared expert with a gate"
        if spec.hidden_size % 8 or feed.expert.size % 8:
            return f"there are no fused kernels for experts of {spec.hidden_size} by {feed.expert.size}"
    return None


def by_torch(reason: str, multiplies: bool = False) -> str:
    """By what a network is computed where kernels of ours cannot, for `reason`; `multiplies`: but for its products."""
    if multiplies:
        return f"native kernels for products and PyTorch for the rest: {reason}"
    return f"plain PyTorch, which is slower: {reason}"
