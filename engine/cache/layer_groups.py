"""The layers of a network by the rows that they need: see `engine/cache/groups.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.cache.kv_rows import layer_rows
from engine.cache.marks import LOG_ROWS
from models.recurrences import Recurrence
from models.spec import Mixer, ModelSpec, kv_sources, reach


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that need no more than the last `window` rows, the row itself included, where others of the network do."""

    window: int
    layers: tuple[int, ...]
    token_bytes: int
    """Bytes that a token takes in all of them."""
    tail: int | None = None
    """How many rows before a row a recurrence reads from the log; None: the layers are no recurrences."""


def layer_groups(spec: ModelSpec, dtype: torch.dtype, kind: str = "auto") -> list[LayerGroup]:
    """Return the groups of a network that computes in `dtype`, but for the primary group; the widest window first.

    A layer that others read needs what they see, and those belong to its group. `kind` is as in `kv_row`.
    """
    sources, rows = kv_sources(spec), layer_rows(spec, dtype, torch.device("cpu"), kind)
    seen: dict[int, list[Mixer]] = {}
    for source, layer in zip(sources, spec.layers, strict=True):
        if layer.mixer is not None:
            seen.setdefault(source, []).append(layer.mixer)
    kinds = {source: _window(mixers) for source, mixers in seen.items()}
    windowed = {(window, tail) for window, tail in kinds.values() if window and window != spec.window}
    groups = []
    for window, tail in sorted(windowed, reverse=True):
        own = [source for source in kinds if kinds[source] == (window, tail)]
        each = sum(rows[source].nbytes * (1 + rows[source].has_v) for source in own)
        layers = tuple(layer for layer, source in enumerate(sources) if source in own)
        groups.append(LayerGroup(window, layers, each, tail if tail >= 0 else None))
    return groups


def _window(mixers: Sequence[Mixer]) -> tuple[int, int]:
    """Return the rows that layers which share theirs need (0: all), and the tail of a recurrence (-1: none)."""
    for mixer in mixers:
        if isinstance(mixer, Recurrence):
            return LOG_ROWS + mixer.conv_width - 1, mixer.conv_width - 1
    windows = [reach(mixer) for mixer in mixers]
    return 0 if None in windows else max(filter(None, windows)), -1
