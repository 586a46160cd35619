"""EXAONE 4: norms after attention and feed-forward, normed heads, and in the 32B model layers without rotation."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.windows import but_last_of_each, sliding_layers, windows
from models.spec import Layer, ModelSpec, each_layer

_PERIOD = 4
"""One layer in each period of this many sees all tokens, where a config does not say."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    spec = base_spec(architecture, fields.or_else(rms_norm_eps=1e-5), head_norm=True)
    window = fields.raw.get("sliding_window", 4096)
    if window is None:
        return _normed(spec, [True] * len(spec.layers))
    period = fields.raw.get("sliding_window_pattern", _PERIOD)
    sliding = sliding_layers(spec, fields, _local(fields, period, len(spec.layers)))
    return _normed(windows(spec, fields, fields.integer("sliding_window", 4096), sliding), sliding)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "exaone4", config.fields
    layers = fields.integer(f"{name}.block_count", limit=1024)
    has_window = bool(fields.raw.get(f"{name}.attention.sliding_window"))
    local = but_last_of_each(_PERIOD, layers) if has_window else [True] * layers
    fields = fields.or_else(**{f"{name}.attention.sliding_window_pattern": local})
    spec = base_spec_of_gguf("Exaone4ForCausalLM", name, replace(config, fields=fields), head_norm=True)
    return _normed(spec, local)


def _local(fields: Fields, pattern: object, layers: int) -> list[bool]:
    """Return which layers have a window, by a period (the last layer of each has none) or by letters such as "LLLG"."""
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return but_last_of_each(pattern, layers)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [pattern[index % len(pattern)] == "L" and index < layers - 1 for index in range(layers)]
    raise ModelError(
        f"sliding_window_pattern in {fields.where} is {str(pattern)[:60]}; it must be a whole number above 0, or "
        'letters such as "LLLG".'
    )


def _normed(spec: ModelSpec, rotated: list[bool]) -> ModelSpec:
    """Return `spec` with norms after each part, and rotation in the layers of `rotated` alone."""
    norm = spec.final_norm

    def normed(index: int, layer: Layer) -> Layer:
        attention = layer.attention if rotated[index] else replace(layer.attention, rope=None)
        return Layer(attention, layer.feed_forward, None, norm, None, norm)

    return each_layer(spec, normed)


FAMILY = Family(
    architectures=("Exaone4ForCausalLM",),
    model_types=("exaone4",),
    from_hf=_from_hf,
    gguf_architecture="exaone4",
    from_gguf=_from_gguf,
)
