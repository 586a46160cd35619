"""Gated delta nets in plain torch (Yang, Kautz and Hatamizadeh 2024; see `models.recurrences.DeltaNet`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.network import DeltaNetWeights
from models.recurrences import DeltaNet
from models.reference.attention import RecurrentRows, Walk
from models.reference.causal_convolution import convolved

_LENGTH_EPS = 1e-6
"""Added to the squared lengths of q and k, as in transformers."""


def walk(spec: DeltaNet, weights: DeltaNetWeights, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance a state by n rows: return y [n, output_size] and the state after them, fp32 `state_shape`.

    `rows` [conv_width - 1 + n, log_size] are the log rows and those before them, zeros before the first of a text;
    `state` fp32 is that before the n rows, and is not changed. y has the dtype of `rows`. However a text is cut, each
    row has the same bits: what is computed for many rows at once is correctly rounded, all else row by row.
    """
    inputs = convolved(rows[:, : spec.conv_size], weights.filters, None).float()
    q, k, v = torch.split(inputs, [spec.key_size, spec.key_size, spec.output_size], dim=-1)
    q, k = (_by_value_head(spec, _unit(part.view(-1, spec.key_heads, spec.key_dim))) for part in (q, k))
    texts = (
        (q * spec.key_dim**-0.5).unsqueeze(2),
        k.unsqueeze(2),
        v.view(-1, spec.value_heads, 1, spec.value_dim),
    )
    gates = rows[spec.conv_width - 1 :, spec.conv_size :]
    state, outs = state.clone(), rows.new_empty(len(inputs), spec.value_heads, 1, spec.value_dim)
    for *given, own, out in zip(*texts, gates, outs, strict=True):
        # Copies, because the order of sums may depend on where in memory their numbers begin.
        q, k, v = (part.clone() for part in given)
        b, a = own.clone().chunk(2)
        state *= torch.exp(weights.decay * F.softplus(a.float() + weights.dt_bias)).view(-1, 1, 1)
        change = (v - torch.bmm(k, state)) * b.sigmoid().float().view(-1, 1, 1)
        state.addcmul_(k.mT, change)
        out.copy_(torch.bmm(q, state))
    return outs.flatten(1), state


def between(
    spec: DeltaNet, weights: DeltaNetWeights, index: int, given: Tensor, gates: Tensor, backend: RecurrentRows
) -> Tensor:
    """Compute layer `index` between its products: q, k, v and z [T, conv_size + output_size] and b and a
    [T, 2 * value_heads] -> [T, output_size]."""
    qkv, z = torch.split(given, [spec.conv_size, spec.output_size], dim=-1)
    out = backend.recur(index, torch.cat((qkv, gates), dim=-1), Walk(walk, spec, weights))
    return gated_norm(spec, weights, out, z)


def gated_norm(spec: DeltaNet, weights: DeltaNetWeights, y: Tensor, z: Tensor) -> Tensor:
    """Norm each value head of y [n, output_size] and gate it with z [n, output_size]: -> the same shape and dtype."""
    heads = y.view(len(y), spec.value_heads, -1)
    normed = F.rms_norm(heads, heads.shape[-1:], eps=spec.norm_eps) * weights.norm.weight
    return (normed * F.silu(z.float()).view_as(heads)).to(y.dtype).flatten(1)


def _unit(x: Tensor) -> Tensor:
    """Divide the heads x [n, heads, key_dim] by their lengths."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _by_value_head(spec: DeltaNet, x: Tensor) -> Tensor:
    """Return for each value head what it reads of the key heads x [n, key_heads, key_dim]: [n, value_heads,
    key_dim]."""
    times = spec.value_heads // spec.key_heads
    return x.repeat(1, times, 1) if spec.alternating else x.repeat_interleave(times, dim=1)
