"""The description of a network for texts of a limited length."""

from dataclasses import replace

from models.spec import Attention, LatentAttention, Mixer, ModelSpec, each_layer


def for_context(spec: ModelSpec, context: int) -> ModelSpec:
    """Return `spec` for texts of at most `context` tokens: longrope keeps only its short divisors if those suffice, and
    chunks that are as long as a text are left out."""

    def fitted(mixer: Mixer | None) -> Mixer | None:
        if isinstance(mixer, Attention) and mixer.chunk is not None and mixer.chunk >= context:
            mixer = replace(mixer, chunk=None)
        if not isinstance(mixer, Attention | LatentAttention) or (rope := mixer.rope) is None:
            return mixer
        if rope.long_factors is None or context > rope.original_positions:
            return mixer
        return replace(mixer, rope=replace(rope, long_factors=rope.frequency_factors))

    return each_layer(spec, lambda _, layer: replace(layer, mixer=fitted(layer.mixer)))
