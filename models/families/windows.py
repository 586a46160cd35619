"""Which layers see only the last tokens, from a config.json."""

from dataclasses import replace
from typing import Any

from models.errors import ModelError
from models.families.fields import Fields
from models.spec import ModelSpec


def windows(spec: ModelSpec, fields: Fields, window: Any) -> ModelSpec:
    """`spec` with a sliding window of `window` tokens in the layers that layer_types names, or in all; None: in none.

    A window as long as the context is none. Raises ModelError for a layer type that is neither.
    """
    named = fields.raw.get("layer_types")
    kinds = named if isinstance(named, list) else []
    other = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if other is not None:
        raise ModelError(
            f"{fields.where} requires layers of type {str(other)[:60]}, which is not supported; choose a model "
            "without them."
        )
    if len(kinds) != len(spec.layers):
        kinds = [None] * len(spec.layers)
    if not isinstance(window, int) or isinstance(window, bool) or not 0 < window < spec.max_positions:
        return spec
    return replace(
        spec,
        layers=tuple(
            layer
            if kind == "full_attention"
            else replace(layer, attention=replace(layer.attention, window=window))
            for layer, kind in zip(spec.layers, kinds, strict=True)
        ),
    )
