"""Attention with a window, another scale, capped scores or sinks, in plain torch: no kernel of ours knows them yet."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.network import Network
from models.spec import Attention


@dataclass(frozen=True, slots=True)
class Unusual:
    """The attention of one layer, and its sinks [q heads] where it has some."""

    spec: Attention
    sinks: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of the last t rows: q [t, Hq, D], k and v [rows, Hkv, D] -> [t, Hq, D].

        Scores and softmax are in fp32.
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
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(spec.kv_heads, spec.groups, 1, 1).expand(-1, -1, count, 1)
            shares = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        out = shares.to(v.dtype) @ v.permute(1, 0, 2).unsqueeze(1)  # [Hkv, G, t, D]
        return out.permute(2, 0, 1, 3).reshape(count, spec.heads, spec.head_dim)


def unusual_layers(network: Network) -> dict[int, Unusual]:
    """The layers of a network whose attention is no plain softmax, by their number."""
    attentions = [layer.attention for layer in network.spec.layers]
    return {
        index: Unusual(spec, weights.attention.sinks)
        for index, (spec, weights) in enumerate(zip(attentions, network.layers, strict=True))
        if not spec.is_plain
    }
