"""Which layers have which mixer."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from models.errors import ModelError
from models.families.fields import Fields
from models.spec import Mixer, ModelSpec, each_layer


def layer_kinds(fields: Fields, layers: int, known: Collection[str]) -> list[str] | None:
    """Return the `layer_types` of a config for its `layers` layers; None if there are none.

    Raises ModelError if they are not one of `known` for each layer.
    """
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"layer_types in {fields.where} is {str(kinds)[:60]!r}; it must name {layers} layers, each of them "
            f"{' or '.join(known)}."
        )
    return kinds


def with_mixer(spec: ModelSpec, mixer: Mixer, chosen: Sequence[bool]) -> ModelSpec:
    """Return `spec` with `mixer` in place of the attention of the chosen layers. Raises ModelError if of all."""
    if all(chosen):
        raise ModelError(
            "The config has no layer with attention, which is not supported; choose another model."
        )
    return each_layer(spec, lambda i, layer: replace(layer, mixer=mixer) if chosen[i] else layer)
