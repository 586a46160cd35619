# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of many tokens of one sequence over its block table, in one order of sums however a prompt is cut.

The plain twin is `engine/attention/sdpa.py`. One program takes QUERIES tokens of one query head through all rows that
they see. Tiles of rows begin at fixed rows, and what a token does not see adds exact zeros, so its bits are the same
whatever is computed beside it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.paged_attention import attend_tile
from models.spec import Attention

QUERIES = 128
"""Tokens of a program."""
TILE = 64
"""Rows read at once."""


@triton.jit
def _prompt_kernel(
    q, keys, values, span, table, out, scale_log2,
    STRIDE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr = 0,
    CAP_LOG2: tl.constexpr = 0.0, sinks=None,
):  # fmt: skip
    """Arguments as in `prompt_attention`; STRIDE numbers from token to token of q, D: the power of two from DIM on."""
    # The last tokens see most: they begin first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    head = tl.program_id(0)
    base, start, stop = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    token = first + tl.arange(0, QUERIES)
    dim = tl.arange(0, D)
    row = base + token
    here = q + token[:, None] * STRIDE + head * DIM + dim[None, :]
    queries = tl.load(here) if DIM == D else tl.load(here, (dim < DIM)[None, :], 0.0)
    m = tl.full([QUERIES], float("-inf"), tl.float32)
    l = tl.zeros([QUERIES], tl.float32)  # noqa: E741
    acc = tl.zeros([QUERIES, D], tl.float32)
    end = tl.minimum(base + first + QUERIES, stop)
    end = tl.where(end > start, end, 0).to(tl.int32)  # of padding alone: nothing
    oldest = 0
    if WINDOW > 0:  # of the first token
        oldest = tl.maximum(base + first - (WINDOW - 1), 0) // TILE * TILE
    for begin in range(oldest, end, TILE):
        seen = begin + tl.arange(0, TILE)
        there = seen < end
        block = tl.load(table + seen // BLOCK, there, 0).to(tl.int64)
        slot = block * BLOCK + seen % BLOCK
        at = slot[:, None] * (KV_HEADS * DIM) + (head // GROUP) * DIM + dim[None, :]
        inside = there[:, None]
        if DIM < D:
            inside = inside & (dim < DIM)[None, :]
        k = tl.load(keys + at, inside, 0.0)
        v = tl.load(values + at, inside, 0.0)
        visible = seen[None, :] <= row[:, None]
        if WINDOW > 0:
            visible = visible & (seen[None, :] > row[:, None] - WINDOW)
        m, l, acc = attend_tile(queries, k, v, visible, m, l, acc, scale_log2, CAP_LOG2)  # noqa: E741
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        l = l * tl.exp2(m - top) + tl.exp2(sink - top)  # noqa: E741
        acc *= tl.exp2(m - top)[:, None]
    mixed = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    heads = tl.num_programs(0)
    target = out + token[:, None] * (heads * DIM) + head * DIM + dim[None, :]
    if DIM == D:
        tl.store(target, mixed.to(out.dtype.element_ty))
    else:
        tl.store(target, mixed.to(out.dtype.element_ty), (dim < DIM)[None, :])


def prompt_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    span: Tensor,
    table: Tensor,
    *,
    spec: Attention,
    block_size: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of tokens that lie in consecutive rows; their K and V are written already.

    q [T, Hq, D], T a multiple of QUERIES, heads side by side; keys and values [slots, Hkv, D] of one layer, contiguous.
    Scale, cap and window are those of `spec`, `sinks` [Hq] its sinks. span int32 [3]: the row of token 0, the first row
    that there is a token of, the row after the last; tokens before and after are padding, whose output is finite and
    means nothing. table int32 [blocks]. Both are read on the device. Returns [T, Hq, D].
    """
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    _prompt_kernel[(heads, tokens // QUERIES)](
        q, keys, values, span, table, out, spec.softmax_scale * math.log2(math.e),
        STRIDE=q.stride(0), GROUP=heads // keys.shape[1], DIM=dim, D=triton.next_power_of_2(dim),
        KV_HEADS=keys.shape[1], BLOCK=block_size, QUERIES=QUERIES, TILE=TILE, WINDOW=spec.window or 0,
        CAP_LOG2=(spec.score_cap or 0.0) * math.log2(math.e), sinks=sinks,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return out
