"""Attention of the tokens of a decode step, one a sequence, from their projected heads to parts of their output.

The plain twins: the head norm and the rotation in `models/families/qwen3.py` and `models/reference/rope.py`, the
cache write and the attention in `engine/attention/sdpa.py`. A program serves one KV head and one chunk of rows. It
loads its first rows of the cache before it waits: rows before the new one were written in earlier steps.

A tile of rows is [R, 1, W, D]: W groups of threads (D / 8 threads each) with R rows of their own. Each group holds
the query heads [1, G, W, D] and keeps its own online softmax, so that nothing leaves a group before the very end.
Triton hands the axes out to threads from the last one on, which is why they are in this order.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _load_rows(
    cache,
    table,
    head,
    first,
    end,
    W: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    HKV,
    D: tl.constexpr,
):
    """Rows [R, 1, W, D] of K or V from row `first` of a block table on; zero from row `end` on."""
    rows = (tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :])[:, None, :, None]
    seen = first + rows < end
    if BLOCK % (W * R) == 0:  # the tile lies in one block
        start = (
            tl.load(table + first // BLOCK, mask=first < end, other=0).to(tl.int64) * BLOCK + first % BLOCK
        )
        slots = start + rows
    else:
        blocks = tl.load(table + (first + rows) // BLOCK, mask=seen, other=0).to(tl.int64)
        slots = blocks * BLOCK + (first + rows) % BLOCK
    at = (slots * HKV + head) * D + tl.arange(0, D)[None, None, None, :]
    return tl.load(cache + at, mask=seen, other=0.0)


@triton.jit
def _norm(x, mean_of, weight, D: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm by the mean square of `mean_of`: normalise in fp32, cast, then multiply by the weight."""
    scale = tl.rsqrt(tl.sum(mean_of * mean_of, 3, keep_dims=True) / D + EPS)
    unit = (x * scale).to(weight.dtype).to(tl.float32)
    return (unit * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


@triton.jit
def _rotate(x, other, cosine, sine, dtype: tl.constexpr):
    """x and the other half of it, rotated in the model's dtype."""
    return ((x * cosine).to(dtype).to(tl.float32) + (other * sine).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _attend(q, k, v, seen, high, total, sums, scale_log2):
    """One step of the online softmax: q [1, G, W, D], k and v [R, 1, W, D], seen [R, 1, W, 1].

    State: the highest score and the sum of the weights [1, G, W, 1], the sum of the weighted values [1, G, W, D].
    """
    scores = tl.sum(q * k.to(tl.float32), 3, keep_dims=True) * scale_log2
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(high, tl.max(scores, 0, keep_dims=True))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base)
    shrink = tl.exp2(high - base)
    total = total * shrink + tl.sum(weights, 0, keep_dims=True)
    sums = sums * shrink + tl.sum(weights * v.to(tl.float32), 0, keep_dims=True)
    return highest, total, sums


@triton.jit
def attention_kernel(
    heads,
    norm_weight,
    rotary,
    cache_k,
    cache_v,
    active,
    tables,
    counters,
    partial,
    lse,
    scale_log2,
    TABLE: tl.constexpr,
    FROM: tl.constexpr,
    UNTIL: tl.constexpr,
    CHUNKS: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write K and V of each new token and attend with its query heads to the rows of its sequence up to it.

    heads [rows, HQ + 2 HKV, D]: q, k and v as projected; norm_weight [HQ + HKV, D]; rotary [positions, D]: cos beside
    sin; cache_k and cache_v [places, HKV, D]; active int32 [rows]: the slot of each, -1 for none; tables int32
    [slots, TABLE]; counters int64 [slots, 2]: the row of the token in its sequence, then its position. G is the power
    of two from HQ / HKV on. Programs [HKV, chunks, rows]; one takes a chunk: TILES tiles of W * R rows of a sequence.
    It leaves its output in partial fp32 [rows, CHUNKS, HQ, D] and log2 of the sum of its weights in lse fp32 [rows,
    CHUNKS, HQ]; programs beyond the last row leave nothing. `combine_kernel` puts the chunks together.

    Where UNTIL is not 0, only tokens in rows FROM to UNTIL of their sequences are served: a launch for each way of
    cutting sequences into chunks, since a sequence must be cut as if it were alone.
    """
    gdc_launch_dependents(PDL)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2)
    dtype: tl.constexpr = heads.dtype.element_ty
    GROUP: tl.constexpr = HQ // HKV
    TILE: tl.constexpr = W * R
    slot = tl.load(active + batch)
    row = tl.load(counters + 2 * slot, mask=slot >= 0, other=-1).to(tl.int32)
    first = chunk * TILE * TILES
    idle = first > row
    if UNTIL > 0:
        idle = idle | (row < FROM) | (row >= UNTIL)
    if idle:
        gdc_wait(
            PDL
        )  # where some programs ended before others began to wait, a step took up to a tenth longer
        return
    position = tl.load(counters + 2 * slot + 1)
    table = tables + slot.to(tl.int64) * TABLE
    heads += batch * (HQ + 2 * HKV) * D
    k = _load_rows(cache_k, table, head, first, row, W, R, BLOCK, HKV, D)
    v = _load_rows(cache_v, table, head, first, row, W, R, BLOCK, HKV, D)
    place = tl.load(table + row // BLOCK).to(tl.int64) * BLOCK + row % BLOCK

    columns = tl.arange(0, D)[None, None, None, :] + tl.zeros([1, 1, W, 1], tl.int32)
    others = (columns + D // 2) % D
    cosine = tl.load(rotary + position * D + columns % (D // 2)).to(tl.float32)
    sine = tl.load(rotary + position * D + D // 2 + columns % (D // 2)).to(tl.float32)
    sine = tl.where(columns < D // 2, -sine, sine)
    lanes = tl.arange(0, G)[None, :, None, None]
    real = lanes < GROUP
    q_at = (head * GROUP + lanes) * D
    k_at = (HQ + head) * D
    if NORM:
        q_weight = tl.load(norm_weight + q_at + columns, mask=real, other=0.0)
        q_other_weight = tl.load(norm_weight + q_at + others, mask=real, other=0.0)
        k_weight = tl.load(norm_weight + k_at + columns)
        k_other_weight = tl.load(norm_weight + k_at + others)
    # What was loaded so far are weights and rows of earlier steps.
    gdc_wait(PDL)
    q = tl.load(heads + q_at + columns, mask=real, other=0.0).to(tl.float32)
    q_other = tl.load(heads + q_at + others, mask=real, other=0.0).to(tl.float32)
    new_k = tl.load(heads + k_at + columns).to(tl.float32)
    new_k_other = tl.load(heads + k_at + others).to(tl.float32)
    new_v = tl.load(heads + (HQ + HKV + head) * D + columns)
    if NORM:
        q_other = _norm(q_other, q, q_other_weight, D, EPS)
        q = _norm(q, q, q_weight, D, EPS)
        new_k_other = _norm(new_k_other, new_k, k_other_weight, D, EPS)
        new_k = _norm(new_k, new_k, k_weight, D, EPS)
    q = _rotate(q, q_other, cosine, sine, dtype).to(tl.float32)
    new_k = _rotate(new_k, new_k_other, cosine, sine, dtype)

    # The new row is the first that group 0 of its chunk sees.
    group = tl.arange(0, W)[None, None, :, None]
    here = row < first + TILE * TILES
    mine = here & (group == 0) & (lanes < G)
    new_score = tl.sum(q * new_k.to(tl.float32), 3, keep_dims=True) * scale_log2
    high = tl.where(mine, new_score, float("-inf"))
    total = tl.where(mine, 1.0, 0.0)
    sums = tl.where(mine, new_v.to(tl.float32), 0.0)
    if here:
        at = (place * HKV + head) * D + columns
        tl.store(cache_k + at, new_k, mask=group == 0)
        tl.store(cache_v + at, new_v, mask=group == 0)
    rows = tl.arange(0, R)[:, None, None, None] * W + group
    high, total, sums = _attend(q, k, v, first + rows < row, high, total, sums, scale_log2)
    for i in tl.range(1, TILES, num_stages=3):
        start = first + i * TILE
        k = _load_rows(cache_k, table, head, start, row, W, R, BLOCK, HKV, D)
        v = _load_rows(cache_v, table, head, start, row, W, R, BLOCK, HKV, D)
        high, total, sums = _attend(q, k, v, start + rows < row, high, total, sums, scale_log2)

    highest = tl.max(high, 2, keep_dims=True)
    shrink = tl.exp2(high - highest)
    total = tl.sum(total * shrink, 2, keep_dims=True)
    result = tl.sum(sums * shrink, 2, keep_dims=True) / total
    part = (batch * CHUNKS + chunk) * HQ + head * GROUP + lanes
    tl.store(lse + part, highest + tl.log2(total), mask=real)
    tl.store(partial + part * D + tl.arange(0, D)[None, None, None, :], result, mask=real)


@triton.jit
def combine_kernel(
    partial,
    lse,
    active,
    counters,
    out,
    HQ: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows, HQ, D] from the parts of `attention_kernel`; PADDED is the power of two from CHUNKS on.

    A chunk has CHUNK rows, and twice as many up to DOUBLINGS times where CHUNKS chunks do not reach the row of the token.
    What a sequence does not have adds exact zeros. Programs [HQ, rows].
    """
    gdc_launch_dependents(PDL)
    head = tl.program_id(0)
    batch = tl.program_id(1)
    chunks = tl.arange(0, PADDED)
    columns = tl.arange(0, D)
    slot = tl.load(active + batch)
    row = tl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32)
    size = CHUNK
    for _ in tl.static_range(DOUBLINGS):
        size = tl.where(row >= size * CHUNKS, 2 * size, size)
    there = chunks <= row // size
    gdc_wait(PDL)
    if slot >= 0:
        part = (batch * CHUNKS + chunks) * HQ + head
        logs = tl.load(lse + part, mask=there, other=-float("inf"))
        values = tl.load(partial + part[:, None] * D + columns[None, :], mask=there[:, None], other=0.0)
        share = tl.exp2(logs - tl.max(logs, 0))
        mixed = tl.sum(values * share[:, None], 0) / tl.sum(share, 0)
        tl.store(out + (batch * HQ + head) * D + columns, mixed.to(out.dtype.element_ty))
