"""The layers of a network by the rows that they need: see `engine/cache/groups.py`."""

from dataclasses import dataclass

import torch

from engine.cache.kv_rows import layer_rows
from models.spec import ModelSpec, kv_sources, reach


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see no more than the last `window` rows, the row itself included, where others of the network do."""

    window: int
    layers: tuple[int, ...]
    token_bytes: int
    """Bytes that a token takes in all of them."""


def layer_groups(spec: ModelSpec, dtype: torch.dtype, kind: str = "auto") -> list[LayerGroup]:
    """Return the groups of a network that computes in `dtype`, but for the primary group; the widest window first.

    A layer that others read needs what they see, and those belong to its group. `kind` is as in `kv_row`.
    """
    sources, rows = kv_sources(spec), layer_rows(spec, dtype, torch.device("cpu"), kind)
    seen: dict[int, list[int | None]] = {}
    for layer, source in enumerate(sources):
        if (mixer := spec.layers[layer].mixer) is not None:
            seen.setdefault(source, []).append(reach(mixer))
    windows = {source: None if None in seen[source] else max(filter(None, seen[source])) for source in seen}
    found = {window for window in windows.values() if window is not None and window != spec.window}
    groups = []
    for window in sorted(found, reverse=True):
        own = [source for source in windows if windows[source] == window]
        each = sum(rows[source].nbytes * (1 + rows[source].has_v) for source in own)
        layers = tuple(layer for layer, source in enumerate(sources) if source in own)
        groups.append(LayerGroup(window, layers, each))
    return groups
