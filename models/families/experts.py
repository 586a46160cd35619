"""Which layers have a mixture of experts."""

from collections.abc import Iterable
from dataclasses import replace

from models.errors import ModelError
from models.families.family import GGUFConfig
from models.families.fields import Fields
from models.spec import Experts, ModelSpec, each_layer


def with_experts(spec: ModelSpec, experts: Experts, layers: Iterable[int]) -> ModelSpec:
    """Return `spec` with experts as the feed-forward of these layers. Raises ModelError for a damaged config."""
    check_experts(experts)
    chosen = set(layers)
    return each_layer(spec, lambda i, layer: replace(layer, feed_forward=experts) if i in chosen else layer)


def check_experts(experts: Experts) -> Experts:
    """Return the experts. Raises ModelError for a damaged config."""
    if experts.chosen > experts.count:
        raise ModelError(
            f"The config chooses {experts.chosen} of {experts.count} experts; it is damaged: download it again."
        )
    size = experts.count // experts.groups
    fits = experts.count % experts.groups == 0 and experts.chosen_groups <= experts.groups
    if experts.groups > 1 and not (
        fits and experts.chosen <= experts.chosen_groups * size and experts.group_best <= size
    ):
        raise ModelError(
            f"The config chooses {experts.chosen} of {experts.count} experts from {experts.chosen_groups} of "
            f"{experts.groups} groups; it is damaged: download it again."
        )
    return experts


def gguf_expert_layers(config: GGUFConfig, spec: ModelSpec) -> list[int]:
    """Return the layers of a GGUF file that have a router."""
    return [i for i in range(len(spec.layers)) if f"blk.{i}.ffn_gate_inp.weight" in config.tensors]


def whole_numbers(fields: Fields, key: str) -> list[int]:
    """Return a list of whole numbers, [] if the key is missing. Raises ModelError."""
    value = fields.raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ModelError(
            f"{key} in {fields.where} is {str(value)[:60]!r}; it must be a list of whole numbers."
        )
    return value
