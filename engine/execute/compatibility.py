"""What an executor cannot do of a network, feature by feature, in words for people."""

from models.features import Feature, features
from models.spec import ModelSpec

BIASES = frozenset({Feature.QKV_BIAS, Feature.OUT_BIAS, Feature.FEED_FORWARD_BIAS})
"""What every executor of ours computes."""

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
