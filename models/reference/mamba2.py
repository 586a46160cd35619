"""Mamba-2 in plain torch (Dao and Gu 2024; see `models.recurrences.Mamba2`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.network import Mamba2Weights
from models.recurrences import Mamba2
from models.reference.attention import RecurrentRows, Walk
from models.reference.causal_convolution import convolved
from models.reference.divided_norms import GroupSquares


def walk(spec: Mamba2, weights: Mamba2Weights, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance a state by n rows: return y fp32 [n, output_size] and the state after them, fp32 `state_shape`.

    `rows` [conv_width - 1 + n, log_size] are the log rows and those before them, zeros before the first of a text;
    `state` fp32 is that before the n rows, and is not changed. However a text is cut, each row has the same bits:
    what is computed for many rows at once is correctly rounded, and all else is computed row by row.
    """
    inputs = convolved(rows[:, : spec.conv_size], weights.filters, weights.conv_bias)
    x, b, c = torch.split(inputs.float(), _sizes(spec), dim=-1)
    steps = [_step(spec, weights, row) for row in rows[spec.conv_width - 1 :, spec.conv_size :].unbind(0)]
    state = state.clone()
    by_group = state.view(spec.groups, -1, spec.state_size)  # the rows of all heads of a group
    outs = torch.empty((len(steps), *spec.state_shape[:2]), dtype=torch.float32, device=rows.device)
    for row, step in enumerate(steps):
        heads = x[row].view(spec.heads, spec.head_dim)
        state *= torch.exp(step * weights.decay)[:, None, None]
        by_group.addcmul_((step[:, None] * heads).view(spec.groups, -1, 1), b[row].view(spec.groups, 1, -1))
        # A copy, because the order of the sums depends on where in memory its numbers begin.
        read = torch.bmm(c[row].clone().view(spec.groups, 1, -1), by_group.mT)
        outs[row] = read.view_as(heads) + weights.skip[:, None] * heads
    return outs.flatten(1), state


def between(
    spec: Mamba2,
    weights: Mamba2Weights,
    index: int,
    given: Tensor,
    backend: RecurrentRows,
    squares: GroupSquares | None = None,
) -> Tensor:
    """Compute layer `index` between its products: z, x, B, C and dt [T, all of them] -> [T, output_size].

    `squares` is as in `gated_norm`.
    """
    z, rows = torch.split(multiplied(spec, given), [spec.output_size, spec.log_size], dim=-1)
    return gated_norm(spec, weights, backend.recur(index, rows, Walk(walk, spec, weights)), z, squares)


def multiplied(spec: Mamba2, projected: Tensor) -> Tensor:
    """Multiply z, x, B, C and dt [n, all of them] by the multipliers: -> the same shape."""
    if spec.multipliers is None:
        return projected
    sizes = [spec.output_size, *_sizes(spec), spec.heads]
    parts = zip(torch.split(projected, sizes, dim=-1), spec.multipliers, strict=True)
    return torch.cat([part * multiplier for part, multiplier in parts], dim=-1)


def gated_norm(
    spec: Mamba2, weights: Mamba2Weights, y: Tensor, z: Tensor, squares: GroupSquares | None = None
) -> Tensor:
    """Gate and norm y fp32 [n, output_size] with z [n, output_size]: -> the same shape, in the dtype of z.

    The norm covers one group of heads at a time; with `squares`, other ranks have heads of these groups. Computed in
    fp32 and rounded once.
    """
    gate = F.silu(z.float())
    if spec.norm_eps is None or weights.norm is None:
        return (y * gate).to(z.dtype)
    given = y if spec.norms_first else y * gate
    by_group = given.view(len(given), spec.groups, -1)
    if squares is None:
        normed = F.rms_norm(by_group, by_group.shape[-1:], eps=spec.norm_eps)
    else:
        mean = squares(by_group.square().sum(-1))
        normed = by_group * torch.rsqrt(mean + spec.norm_eps).unsqueeze(-1)
    normed = normed.flatten(1) * weights.norm.weight.float()
    return (normed * gate if spec.norms_first else normed).to(z.dtype)


def _sizes(spec: Mamba2) -> list[int]:
    """Return the sizes of x, B and C."""
    return [spec.output_size, *[spec.groups * spec.state_size] * 2]


def _step(spec: Mamba2, weights: Mamba2Weights, dt: Tensor) -> Tensor:
    """Return t of a row, from dt [heads]: fp32 [heads]."""
    return F.softplus(dt.float() + weights.dt_bias).clamp(*spec.step_limits)
