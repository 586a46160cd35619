# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of a few query tokens over a block table, with the rows split among programs ("split KV").

The plain twin is `engine/attention/sdpa.py`. One program takes SPLIT rows of one KV head for QUERIES query rows: the
query heads of the KV head, token by token, since they all read the same K and V. A second kernel combines the splits of
a token. "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov 2023).

The result of a token is bitwise independent of how many tokens are computed with it: tiles have one fixed size, splits
begin at fixed rows, and rows that a token does not see add exact zeros.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.kv_rows import decoded
from engine.kernels.triton.pointwise import capped

QUERIES = 16
"""Query rows of a tile: the fewest that tl.dot accepts."""
SPLIT = 128
"""Rows of a split: few enough that a short context still fills the GPU."""
TILE = 64
"""Rows read at once."""
COMBINE = 32
"""Splits read at once."""


@triton.jit
def attend_tile(q, k, v, visible, m, l, acc, scale_log2, CAP_LOG2: tl.constexpr = 0.0):  # noqa: E741 - as in the paper
    """Run one step of the online softmax: add C more rows to the state of M queries.

    q [M, D]; k and v [C, D]; visible [M, C] bool; `scale_log2` is the scale of the scores times log2(e), CAP_LOG2 their
    cap in the same units (0: none). M, C and D are powers of two from 16 on. In rows that no query sees, v must be
    finite (its weight is 0, and 0 * NaN is NaN). The state is fp32 and carried from tile to tile: m [M], the highest
    score so far (initially -inf), l [M], the sum of the weights relative to it (0), acc [M, D], the weighted sum of v
    (0). Returns (m, l, acc); the output is acc / l, and the base-2 logarithm of the sum of the weights is m + log2(l).

    A tile of which a query sees nothing leaves its m, l and acc bitwise unchanged. From "FlashAttention-2: Faster
    Attention with Better Parallelism and Work Partitioning" (Dao 2023), algorithm 1.
    """
    scores = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2, CAP_LOG2)
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1))
    # A query that has seen nothing yet has no highest score: -inf - -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(m - base)
    l = l * shrink + tl.sum(weights, 1)  # noqa: E741
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return highest, l, acc


@triton.jit
def load_rows(
    rows, scales, slot, there, head, dim, inside, dtype: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROW: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Load numbers [C, D] of a head from rows at slots [C], masked by `there` and `inside`; ROW > 0: quantised rows."""
    if ROW > 0:
        codes = tl.load(rows + slot[:, None] * ROW + head * DIM + dim[None, :], inside, 0)
        scale = tl.load(scales + slot * (ROW // 4) + head, there, 0.0)
        found = (decoded(codes, FP8) * scale[:, None]).to(dtype)
    else:
        at = slot[:, None] * (KV_HEADS * DIM) + head * DIM + dim[None, :]
        found = tl.load(rows + at, inside, 0.0)
    return found


# A value that changes from step to step must not recompile the kernel.
@triton.jit(do_not_specialize=["table_stride", "tiles", "splits"])
def _split_kernel(
    q, keys, values, spans, tables, sums, stats,
    scale_log2, table_stride, token_stride, head_stride, tiles, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    k_scales=None, v_scales=None, ROW: tl.constexpr = 0, FP8: tl.constexpr = False,
):  # fmt: skip
    """Compute m, l and acc of SPLIT rows for QUERIES query rows; arguments as in `paged_attention`."""
    split, kv_head = tl.program_id(0), tl.program_id(1)
    span, tile = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    first = tl.load(spans + span * 3)
    start = tl.load(spans + span * 3 + 1)
    count = tl.load(spans + span * 3 + 2)
    last = tl.minimum(count, (tile * QUERIES + QUERIES - 1) // GROUP + 1)
    if (split * SPLIT >= start + last) | (tile * QUERIES >= count * GROUP):
        return
    row = tile * QUERIES + tl.arange(0, QUERIES)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, D)
    real = token < count
    wanted = real[:, None] & (dim < DIM)[None, :]
    here = q + (first + token)[:, None] * token_stride + head[:, None] * head_stride + dim[None, :]
    queries = tl.load(here, wanted, 0.0)
    m = tl.full([QUERIES], float("-inf"), tl.float32)
    l = tl.zeros([QUERIES], tl.float32)  # noqa: E741
    acc = tl.zeros([QUERIES, D], tl.float32)
    for begin in range(0, SPLIT, TILE):
        seen = split * SPLIT + begin + tl.arange(0, TILE)
        there = seen < start + last
        block = tl.load(tables + span * table_stride + seen // BLOCK_SIZE, there, 0).to(tl.int64)
        slot = block * BLOCK_SIZE + seen % BLOCK_SIZE
        inside = there[:, None] & (dim < DIM)[None, :]
        dtype: tl.constexpr = queries.dtype
        k = load_rows(keys, k_scales, slot, there, kv_head, dim, inside, dtype, KV_HEADS, DIM, ROW, FP8)
        v = load_rows(values, v_scales, slot, there, kv_head, dim, inside, dtype, KV_HEADS, DIM, ROW, FP8)
        visible = seen[None, :] <= (start + token)[:, None]
        m, l, acc = attend_tile(queries, k, v, visible, m, l, acc, scale_log2)  # noqa: E741
    # Partial results are ordered by token and query head, then by split.
    part = ((first + token) * (KV_HEADS * GROUP) + head).to(tl.int64) * splits + split
    tl.store(stats + part * 2, m, real)
    tl.store(stats + part * 2 + 1, l, real)
    tl.store(sums + part[:, None] * D + dim[None, :], acc, real[:, None])


@triton.jit(do_not_specialize=["most", "splits"])
def _combine_kernel(
    sums, stats, spans, out, most, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one token and head."""
    span, token = tl.program_id(0) // most, tl.program_id(0) % most
    first = tl.load(spans + span * 3)
    start = tl.load(spans + span * 3 + 1)
    count = tl.load(spans + span * 3 + 2)
    if token >= count:
        return
    row = (first + token) * HEADS + tl.program_id(1)
    there = (start + token) // SPLIT + 1
    dim = tl.arange(0, D)
    m = tl.full([], float("-inf"), tl.float32)
    l = tl.full([], 0.0, tl.float32)  # noqa: E741
    acc = tl.zeros([D], tl.float32)
    begin = 0
    while begin < there:
        split = begin + tl.arange(0, COMBINE)
        part = row.to(tl.int64) * splits + split
        ms = tl.load(stats + part * 2, split < there, float("-inf"))
        ls = tl.load(stats + part * 2 + 1, split < there, 0.0)
        accs = tl.load(sums + part[:, None] * D + dim[None, :], (split < there)[:, None], 0.0)
        highest = tl.maximum(m, tl.max(ms, 0))
        weights = tl.exp2(ms - highest)
        shrink = tl.exp2(m - highest)
        l = l * shrink + tl.sum(weights * ls, 0)  # noqa: E741
        acc = acc * shrink + tl.sum(weights[:, None] * accs, 0)
        m = highest
        begin += COMBINE
    tl.store(out + row.to(tl.int64) * DIM + dim, (acc / l).to(out.dtype.element_ty), dim < DIM)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    tables: Tensor,
    *,
    kv_heads: int,
    block_size: int,
    most_tokens: int,
    most_rows: int,
    **quantized: Any,
) -> Tensor:
    """Compute causal attention of spans of tokens over their block tables; K and V of the spans are already written.

    q [T, Hq, D] with a stride of 1 in D; keys and values [slots, Hkv, D] of one layer, contiguous, in q's dtype (bf16,
    fp16 or fp32), or bytes [slots, ROW] of quantised rows with the arguments of `KVCache.told`. spans int32 [S, 3]:
    where the tokens of a span begin in q, the row of its first token, the number of its tokens. tables int32 [S,
    blocks] with a stride of 1 in the last dimension. No span has more than `most_tokens` tokens or sees more than
    `most_rows` rows. These two set the number of programs, so a captured graph may read spans and tables from buffers
    that change. Returns [T, Hq, D]; tokens outside all spans are left unset.
    """
    tokens, heads, dim = q.shape
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(dim))
    splits = triton.cdiv(most_rows, SPLIT)
    tiles = triton.cdiv(most_tokens * group, QUERIES)
    sums = torch.empty((tokens, heads, splits, padded), dtype=torch.float32, device=q.device)
    stats = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=q.device)
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    scale_log2 = dim**-0.5 * math.log2(math.e)
    _split_kernel[(splits, kv_heads, spans.shape[0] * tiles)](
        q, keys, values, spans, tables, sums, stats,
        scale_log2, tables.stride(0), q.stride(0), q.stride(1), tiles, splits,
        GROUP=group, DIM=dim, D=padded, KV_HEADS=kv_heads, BLOCK_SIZE=block_size,
        QUERIES=QUERIES, SPLIT=SPLIT, TILE=TILE, **quantized, num_warps=4, num_stages=2,
    )  # fmt: skip
    _combine_kernel[(spans.shape[0] * most_tokens, heads)](
        sums, stats, spans, out, most_tokens, splits,
        HEADS=heads, DIM=dim, D=padded, SPLIT=SPLIT, COMBINE=COMBINE, num_warps=4,
    )  # fmt: skip
    return out
