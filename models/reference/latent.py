"""Latent attention (see `models.spec.LatentAttention`), of each sequence in the way that takes less work.

For a prompt, the latents of all rows are expanded to keys and values. For a few rows after many, each query is
multiplied by the transpose of what would expand the keys, and attends to the latents themselves; what it gets is then
expanded to values. The results are equal but for rounding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.network import LatentWeights, Linear, Weight
from models.reference.attention import LatentRows
from models.reference.norms import apply_norm
from models.reference.rope import StepPositions, rotate
from models.spec import LatentAttention

Expansions = tuple[Tensor, Tensor]
"""What makes keys of latents, [heads, kv_rank, nope_dim], and what makes values, [heads, v_dim, kv_rank]."""

LookUp = Callable[[Weight, Tensor, torch.dtype], Tensor]
"""(weight, row numbers int64 [n], dtype) -> [n, columns] in that dtype"""

Multiply = Callable[[Linear, Tensor], Tensor]
"""(a layer, x [T, columns]) -> [T, rows]"""

AT_ONCE = 1 << 24
"""About how many numbers of keys and values, or of scores, are computed at once."""


def between(
    spec: LatentAttention,
    weights: LatentWeights,
    index: int,
    given: tuple[Tensor, Tensor],
    step: StepPositions,
    backend: LatentRows,
    multiply: Multiply,
    look_up: LookUp,
) -> Tensor:
    """Compute layer `index` between its products: `given` are q(x) [T, numbers] and kv_a(x) [T, row_size] ->
    [T, heads * v_dim]. `look_up` reads weights that are not plain."""
    q, row = given
    if weights.q_b is not None:
        q = multiply(weights.q_b, apply_norm(spec.norm, weights.q_norm, q))
    q = q.view(len(q), spec.heads, spec.head_dim)
    latents, k = torch.split(row, [spec.kv_rank, spec.rope_dim], dim=-1)
    latents = apply_norm(spec.norm, weights.kv_norm, latents)
    if weights.rotary is not None:
        assert spec.rope is not None
        first, last = torch.split(q, [spec.nope_dim, spec.rope_dim], dim=-1)
        heads = torch.cat((last, k.unsqueeze(1)), dim=1)
        heads = rotate(heads, step.rotation(weights.rotary), spec.rope.interleaved)
        q, k = torch.cat((first, heads[:, :-1]), dim=-1), heads[:, -1]
    outs, start, expands = [], 0, expansions(spec, weights, q.dtype, look_up)
    for count, rows in backend.latent_rows(index, torch.cat((latents, k), dim=-1)):
        outs.append(attend(spec, expands, q[start : start + count], rows, multiply))
        start += count
    return torch.cat(outs).flatten(1)


def expansions(
    spec: LatentAttention, weights: LatentWeights, dtype: torch.dtype, look_up: LookUp
) -> Expansions:
    """Return what expands latents; of weights that are not plain, numbers of `dtype`."""

    def numbers(layer: Linear) -> Tensor:
        (weight,) = layer.parts
        if weight.is_plain:
            return weight.data
        return look_up(weight, torch.arange(weight.rows, device=weight.data.device), dtype)

    to_keys = numbers(weights.k_b).view(spec.heads, spec.kv_rank, spec.nope_dim)
    return to_keys, numbers(weights.v_b).view(spec.heads, spec.v_dim, spec.kv_rank)


def attend(spec: LatentAttention, expands: Expansions, q: Tensor, rows: Tensor, multiply: Multiply) -> Tensor:
    """Attend causally with the last t rows: q [t, heads, head_dim], rows [R, row_size] -> [t, heads, v_dim].

    q and the keys in rows are rotated already. Which way is chosen depends on t and R alone.
    """
    mask = None
    if len(q) > 1:  # row i of q sees all rows before those of q, and those up to itself
        mask = torch.ones(len(q), len(rows), dtype=torch.bool, device=q.device).tril(len(rows) - len(q))
    if _absorbs(spec, len(q), len(rows)):
        return _absorbed(spec, *expands, q, rows, mask)
    at_once = max(1, AT_ONCE // (len(rows) * (spec.expanded_dim + spec.rope_dim)))
    both = torch.cat((expands[0].mT, expands[1]), dim=1)
    parts = zip(torch.split(both, at_once), torch.split(q, at_once, dim=1), strict=True)
    return torch.cat([_expanded(spec, some, heads, rows, mask, multiply) for some, heads in parts], dim=1)


def _absorbs(spec: LatentAttention, count: int, rows: int) -> bool:
    """Return whether `count` queries that see `rows` rows take less work without expanding these.

    Both ways are counted in multiplications of one head.
    """
    expanding = spec.kv_rank * spec.expanded_dim
    absorbed = count * (expanding + rows * (spec.row_size + spec.kv_rank))
    return absorbed < rows * expanding + count * rows * (spec.head_dim + spec.v_dim)


def _expanded(
    spec: LatentAttention, expands: Tensor, q: Tensor, rows: Tensor, mask: Tensor | None, multiply: Multiply
) -> Tensor:
    """Attend with some heads, whose keys and values `expands` [heads, expanded_dim, kv_rank] makes."""
    latents, key = torch.split(rows, [spec.kv_rank, spec.rope_dim], dim=-1)
    layer = Linear((Weight.plain(expands.flatten(0, 1)),))
    expanded = multiply(layer, latents).view(len(rows), len(expands), -1).transpose(0, 1)
    first, values = torch.split(expanded, [spec.nope_dim, spec.v_dim], dim=-1)
    keys = torch.cat((first, key.expand(len(expands), -1, -1)), dim=-1)
    return _softmax(spec, q.transpose(0, 1), keys, values, mask).transpose(0, 1)


def _absorbed(
    spec: LatentAttention, to_keys: Tensor, to_values: Tensor, q: Tensor, rows: Tensor, mask: Tensor | None
) -> Tensor:
    """Attend with all heads to the rows as they are."""
    first, last = torch.split(q.transpose(0, 1), [spec.nope_dim, spec.rope_dim], dim=-1)
    # In this order, torch multiplies by a few rows several times as fast.
    queries = torch.cat((torch.bmm(to_keys, first.mT).mT, last), dim=-1)  # [heads, t, row_size]
    at_once = max(1, AT_ONCE // (spec.heads * len(rows)))
    outs = []
    for start in range(0, len(q), at_once):
        part = slice(start, start + at_once)
        # All heads are queries of one head, so that the rows are read once.
        given, seen = queries[:, part].reshape(1, -1, spec.row_size), rows.unsqueeze(0)
        visible = None if mask is None else mask[part].repeat(spec.heads, 1)
        # Values as long as keys let torch choose a faster kernel on a CPU; what they add is cut off.
        outs.append(_softmax(spec, given, seen, seen, visible).view(spec.heads, -1, spec.row_size))
    mixed = torch.cat(outs, dim=1)[..., : spec.kv_rank]
    return torch.bmm(to_values, mixed.mT).permute(2, 0, 1)


def _softmax(spec: LatentAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with q [heads, queries, size] to k [heads, rows, size] and v [heads, rows, any size]."""
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.softmax_scale).squeeze(0)
