"""Which layers have which mixer."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from models.errors import ModelError
from models.families.fields import Fields
from models.spec import Mixer, ModelSpec, each_layer


def layer_kinds(
    fields: Fields, layers: int, known: Collection[str], key: str = "layer_types", is_needed: bool = False
) -> list[str] | None:
    """Return the kinds of layers that a config lists as `key` for its `layers` layers; None if it does not.

    Raises ModelError if they are not one of `known` for each layer, or not there although `is_needed`.
    """
    kinds = fields.raw.get(key)
    if kinds is None and not is_needed:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"{key} in {fields.where} is {str(kinds)[:60]!r}; it must name {layers} layers, each of them "
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
