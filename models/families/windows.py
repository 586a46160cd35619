"""Sliding windows of layers, from the configs of Hugging Face models and GGUF files."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from models.errors import ModelError
from models.families.fields import Fields
from models.spec import ModelSpec, each_attention

_FULL, _SLIDING = "full_attention", "sliding_attention"


def windows(spec: ModelSpec, fields: Fields, window: Any, sliding: Sequence[bool] = ()) -> ModelSpec:
    """Return `spec` with a sliding window of `window` tokens in the layers of `sliding_layers`; None: in no layer.

    A window as long as the context is left out. Raises ModelError as `sliding_layers` does.
    """
    return _windowed(spec, window, sliding_layers(spec, fields, sliding))


def sliding_layers(spec: ModelSpec, fields: Fields, usual: Sequence[bool] = ()) -> list[bool]:
    """Return which layers have a sliding window: those in layer_types, otherwise those in `usual`; []: all layers.

    Raises ModelError for layer types other than sliding and full attention.
    """
    named = fields.raw.get("layer_types")
    kinds = named if isinstance(named, list) else []
    other = next((kind for kind in kinds if kind not in (_FULL, _SLIDING)), None)
    if other is not None:
        raise ModelError(
            f"{fields.where} requires layers of type {str(other)[:60]}, which is not supported; choose a model "
            "without them."
        )
    return [kind == _SLIDING for kind in kinds] if len(kinds) == len(spec.layers) else list(usual)


def but_last_of_each(period: int, layers: int) -> list[bool]:
    """Return True for each of `layers` layers but the last of each period of `period` layers."""
    return [(index + 1) % period != 0 for index in range(layers)]


def windows_of_qwen(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Return `spec` with Qwen's windows: if they are used, in the layers from max_window_layers on."""
    window = fields.raw.get("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    first = fields.integer("max_window_layers", 28, least=0)
    return windows(spec, fields, window, [index >= first for index in range(len(spec.layers))])


def windows_of_gguf(spec: ModelSpec, fields: Fields, name: str) -> ModelSpec:
    """Return `spec` with the windows of the GGUF architecture `name`, in the layers that the file names, or in all."""
    pattern = fields.raw.get(f"{name}.attention.sliding_window_pattern")
    sliding = pattern if isinstance(pattern, list) and len(pattern) == len(spec.layers) else ()
    return _windowed(spec, fields.raw.get(f"{name}.attention.sliding_window"), [bool(is_) for is_ in sliding])


def _windowed(spec: ModelSpec, window: Any, sliding: Sequence[bool]) -> ModelSpec:
    if not isinstance(window, int) or isinstance(window, bool) or not 0 < window < spec.max_positions:
        return spec
    return each_attention(
        spec,
        lambda i, attention: replace(attention, window=window) if not sliding or sliding[i] else attention,
    )
