"""Attention with a window, in chunks, with another scale, capped scores or sinks: what layers ask for, and the plain
torch version."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.network import Network
from models.spec import Attention


@dataclass(frozen=True, slots=True)
class Unusual:
    """The attention of one layer, and its sinks [q heads] if it has any."""

    spec: Attention
    sinks: Tensor | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments for `engine.kernels.triton.prompt_attention`."""
        spec = self.spec
        return {
            "scale": spec.softmax_scale,
            "window": spec.window,
            "cap": spec.score_cap,
            "sinks": self.sinks,
        }

    def attend(self, q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
        """Attend causally with the last t rows: q [t, Hq, D], k and v [rows, Hkv, D]; return [t, Hq, D].

        k and v begin with row `first` of the sequence. Scores and softmax are in fp32.
        """
        spec, count, rows = self.spec, q.shape[0], k.shape[0]
        queries = q.reshape(count, spec.kv_heads, spec.groups, spec.head_dim).permute(1, 2, 0, 3).float()
        scores = queries @ k.permute(1, 2, 0).unsqueeze(1).float() * spec.softmax_scale  # [Hkv, G, t, rows]
        if spec.score_cap is not None:
            scores = torch.tanh(scores / spec.score_cap) * spec.score_cap
        own = torch.arange(rows - count, rows, device=q.device).unsqueeze(1)
        seen = torch.arange(rows, device=q.device).unsqueeze(0)
        hidden = seen > own
        if spec.window is not None:
            hidden |= seen <= own - spec.window
        if spec.chunk is not None:
            hidden |= first + seen < (first + own) // spec.chunk * spec.chunk
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(spec.kv_heads, spec.groups, 1, 1).expand(-1, -1, count, 1)
            shares = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        out = shares.to(v.dtype) @ v.permute(1, 0, 2).unsqueeze(1)  # [Hkv, G, t, D]
        return out.permute(2, 0, 1, 3).reshape(count, spec.heads, spec.head_dim)


Layers = Mapping[int, Unusual]
"""The layers of a network whose attention is not plain softmax, by index."""


def unusual_layers(network: Network) -> Layers:
    """Return the unusual layers of a network (see `Layers`)."""
    return {
        index: Unusual(spec, network.layers[index].attention.sinks)
        for index, spec in network.spec.attentions.items()
        if not spec.is_plain
    }


def kinds(specs: Iterable[Attention]) -> tuple[Attention, ...]:
    """Return one of each kind of attention among those of layers: what a backend has to support."""

    def kind(spec: Attention) -> Attention:
        # These fields are applied before a backend gets q, k and v, or after it. A new field counts until it is listed.
        before = {
            "head_norm": None,
            "norms_all_heads": False,
            "norms_rotated": False,
            "query_scaling": None,
            "v_norm": None,
            "v_is_k": False,
            "rope": None,
            "qkv_bias": False,
            "out_bias": False,
            "gate": None,
        }
        return replace(spec, **before)  # type: ignore[arg-type]

    return tuple(dict.fromkeys(map(kind, specs)))


def on_trial(spec: Attention, device: torch.device, dtype: torch.dtype) -> Unusual:
    """Return the same kind of attention, but small: 4 query heads, 2 KV heads, and a small window or chunk."""
    window, chunk = (None if size is None else min(size, 8) for size in (spec.window, spec.chunk))
    sinks = torch.linspace(-1.0, 2.0, 4).to(device, dtype) if spec.sinks else None
    return Unusual(replace(spec, heads=4, kv_heads=2, window=window, chunk=chunk), sinks)
