"""The compatibility check: what an executor cannot do of a network, feature by feature, in words for people.

It reads the description alone, and imports neither torch nor triton.
"""

from models.features import Feature, features
from models.spec import ModelSpec

BIASES = frozenset({Feature.QKV_BIAS, Feature.OUT_BIAS, Feature.FEED_FORWARD_BIAS})
"""What every executor of ours computes."""

KERNELS = BIASES | {Feature.HEAD_NORM}
"""What the native and the fused kernels compute."""

NATIVE = KERNELS | {Feature.EXPERTS, Feature.EXACT_ROUTER, Feature.SELECTION_BIAS}
"""What the native kernels compute."""

PLAIN_ATTENTION = frozenset(Feature) - {Feature.WINDOW, Feature.SCALE, Feature.SCORE_CAP, Feature.SINKS}
"""What there may be in a network whose attention is a plain softmax over all rows before."""


def lacking(spec: ModelSpec, supported: frozenset[Feature]) -> str | None:
    """What of `spec` is not among `supported`, as the object of a sentence: "a sliding window and capped logits".

    None where nothing is lacking.
    """
    words = sorted(feature.value for feature in features(spec) - supported)
    if not words:
        return None
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def not_native(spec: ModelSpec) -> str | None:
    """Why the native kernels of a CPU cannot run such a network, as the middle of a sentence; None if they can."""
    if (lacks := lacking(spec, NATIVE)) is not None:
        return f"the native kernels do not know {lacks}"
    dim = spec.attention.head_dim
    return f"there are no native kernels for a head_dim of {dim}" if dim % 8 else None


def not_fused(spec: ModelSpec) -> str | None:
    """The same of the fused kernels of a GPU."""
    if (lacks := lacking(spec, KERNELS)) is not None:
        return f"the fused kernels do not know {lacks}"
    dim = spec.attention.head_dim
    return f"there are no fused kernels for a head_dim of {dim}" if dim not in (64, 128) else None


def by_torch(reason: str, multiplies: bool = False) -> str:
    """By what a network is computed where kernels of ours cannot, for `reason`; `multiplies`: but for its products."""
    if multiplies:
        return f"native kernels for products and PyTorch for the rest: {reason}"
    return f"plain PyTorch, which is slower: {reason}"
