"""Attention of the tokens of a decode step, one a sequence, from their projected heads to parts of their output.

The plain twins: the head norm and the rotation in `models/families/qwen3.py` and `models/reference/rope.py`, the
cache write and the attention in `engine/attention/sdpa.py`. A program serves one KV head and one chunk of rows. It
loads its first rows of the cache before it waits: rows before the new one were written in earlier steps.

W groups of threads (D / 8 threads each) have rows of their own: R of them at a time, a tuple of tiles [W, D]. Each
group holds all query heads of the KV head, a tuple too, and keeps its own online softmax, so that nothing leaves a
group before the very end. (Tuples and not axes, as in `linear.py`.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,unreachable"
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
    """R tiles [W, D] of rows of K or V from row `first` of a block table on; zero from row `end` on."""
    tiles = ()
    if BLOCK % (W * R) == 0:  # all tiles lie in one block
        block = tl.load(table + first // BLOCK, mask=first < end, other=0).to(tl.int64)
    for i in tl.static_range(R):
        rows = i * W + tl.arange(0, W)[:, None]
        seen = first + rows < end
        if BLOCK % (W * R) == 0:
            slots = block * BLOCK + first % BLOCK + rows
        else:
            blocks = tl.load(table + (first + rows) // BLOCK, mask=seen, other=0).to(tl.int64)
            slots = blocks * BLOCK + (first + rows) % BLOCK
        at = (slots * HKV + head) * D + tl.arange(0, D)[None, :]
        tiles += (tl.load(cache + at, mask=seen, other=0.0),)
    return tiles


@triton.jit
def norm_heads(x, mean_of, weight, D: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm by the mean square of `mean_of`: normalise in fp32, cast, then multiply by the weight."""
    scale = tl.rsqrt(tl.sum(mean_of * mean_of, 1, keep_dims=True) / D + EPS)
    unit = (x * scale).to(weight.dtype).to(tl.float32)
    return (unit * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


@triton.jit
def rotate(x, other, cosine, sine, dtype: tl.constexpr):
    """x and the other half of it, rotated in the model's dtype."""
    return ((x * cosine).to(dtype).to(tl.float32) + (other * sine).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _attend(q, k, v, left, high, total, sums, scale_log2, W: tl.constexpr):
    """One step of the online softmax: of each query head [W, D] with R tiles of K and V [W, D], `left` rows in all.

    State, for each query head: the highest score and the sum of the weights [W, 1], that of the weighted values
    [W, D].
    """
    new_high, new_total, new_sums = (), (), ()
    for g in tl.static_range(len(q)):
        scores = ()
        highest = high[g]
        for i in tl.static_range(len(k)):
            score = tl.sum(q[g] * k[i].to(tl.float32), 1, keep_dims=True) * scale_log2
            score = tl.where(i * W + tl.arange(0, W)[:, None] < left, score, float("-inf"))
            scores += (score,)
            highest = tl.maximum(highest, score)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(high[g] - base)
        weight_sum = total[g] * shrink
        value_sum = sums[g] * shrink
        for i in tl.static_range(len(k)):
            weight = tl.exp2(scores[i] - base)
            weight_sum += weight
            value_sum += weight * v[i].to(tl.float32)
        new_high += (highest,)
        new_total += (weight_sum,)
        new_sums += (value_sum,)
    return new_high, new_total, new_sums


# Another longest context must not compile the kernel again.
@triton.jit(do_not_specialize=["table_stride", "begin", "end"])
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
    table_stride,
    begin,
    end,
    SOME: tl.constexpr,
    CHUNKS: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
    shared=None,
):
    """Write K and V of each new token and attend with its query heads to the rows of its sequence up to it.

    heads [rows, HQ + 2 HKV, D]: q, k and v as projected; norm_weight [HQ + HKV, D]; rotary [positions, D]: cos
    beside sin; cache_k and cache_v [places, HKV, D]; active int32 [rows]: the slot of each, -1 for none; tables
    int32 [slots, table_stride]; counters int64 [slots, 2]: the row of the token in its sequence, then its position.
    Programs [HKV, chunks, rows]; one takes a chunk: TILES tiles of W * R rows of a sequence. It leaves its output
    in partial fp32 [rows, CHUNKS, HQ, D] and log2 of the sum of its weights in lse fp32 [rows, CHUNKS, HQ];
    programs beyond the last row leave nothing. `combine_kernel` puts the chunks together.

    With SOME, only tokens in rows `begin` to `end` of their sequences are served: a launch for each way of cutting
    sequences into chunks, since a sequence must be cut as if it were alone.

    shared int32 [rows]: the chunks that lie wholly in so many first rows are left to `shared_prefix.py`; the first
    program of a sequence takes the one behind them.
    """
    gdc_launch_dependents(PDL)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2)
    dtype: tl.constexpr = heads.dtype.element_ty
    GROUP: tl.constexpr = HQ // HKV
    TILE: tl.constexpr = W * R
    if shared is not None:
        chunk += tl.load(shared + batch) // (TILE * TILES)
    slot = tl.load(active + batch)
    row = tl.load(counters + 2 * slot, mask=slot >= 0, other=-1).to(tl.int32)
    first = chunk * TILE * TILES
    idle = first > row
    if SOME:
        idle = idle | (row < begin) | (row >= end)
    if idle:
        gdc_wait(
            PDL
        )  # where some programs ended before others began to wait, a step took up to a tenth longer
        return
    position = tl.load(counters + 2 * slot + 1)
    table = tables + slot.to(tl.int64) * table_stride
    heads += batch * (HQ + 2 * HKV) * D
    k = _load_rows(cache_k, table, head, first, row, W, R, BLOCK, HKV, D)
    v = _load_rows(cache_v, table, head, first, row, W, R, BLOCK, HKV, D)
    place = tl.load(table + row // BLOCK).to(tl.int64) * BLOCK + row % BLOCK

    columns = tl.arange(0, D)[None, :] + tl.zeros([W, 1], tl.int32)
    others = (columns + D // 2) % D
    cosine = tl.load(rotary + position * D + columns % (D // 2)).to(tl.float32)
    sine = tl.load(rotary + position * D + D // 2 + columns % (D // 2)).to(tl.float32)
    sine = tl.where(columns < D // 2, -sine, sine)
    # Query heads, then the key head: where they are, and their weights.
    weights, other_weights = (), ()
    for g in tl.static_range(GROUP + 1):
        at = (head * GROUP + g if g < GROUP else HQ + head) * D
        if NORM:
            weights += (tl.load(norm_weight + at + columns),)
            other_weights += (tl.load(norm_weight + at + others),)
    # What was loaded so far are weights and rows of earlier steps.
    gdc_wait(PDL)
    new_v = tl.load(heads + (HQ + HKV + head) * D + columns)
    placed = ()
    for g in tl.static_range(GROUP + 1):
        at = (head * GROUP + g if g < GROUP else HQ + head) * D
        x = tl.load(heads + at + columns).to(tl.float32)
        other = tl.load(heads + at + others).to(tl.float32)
        if NORM:
            other = norm_heads(other, x, other_weights[g], D, EPS)
            x = norm_heads(x, x, weights[g], D, EPS)
        placed += (rotate(x, other, cosine, sine, dtype),)
    new_k = placed[GROUP]

    # The new row is the first that group 0 of its chunk sees.
    group = tl.arange(0, W)[:, None]
    here = row < first + TILE * TILES
    mine = here & (group == 0)
    q, high, total, sums = (), (), (), ()
    for g in tl.static_range(GROUP):
        x = placed[g].to(tl.float32)
        score = tl.sum(x * new_k.to(tl.float32), 1, keep_dims=True) * scale_log2
        q += (x,)
        high += (tl.where(mine, score, float("-inf")),)
        total += (tl.where(mine, 1.0, 0.0),)
        sums += (tl.where(mine, new_v.to(tl.float32), 0.0),)
    if here:
        target = (place * HKV + head) * D + columns
        tl.store(cache_k + target, new_k, mask=group == 0)
        tl.store(cache_v + target, new_v, mask=group == 0)
    high, total, sums = _attend(q, k, v, row - first, high, total, sums, scale_log2, W)
    for i in tl.range(1, TILES, num_stages=3):
        start = first + i * TILE
        k = _load_rows(cache_k, table, head, start, row, W, R, BLOCK, HKV, D)
        v = _load_rows(cache_v, table, head, start, row, W, R, BLOCK, HKV, D)
        high, total, sums = _attend(q, k, v, row - start, high, total, sums, scale_log2, W)

    for g in tl.static_range(GROUP):
        highest = tl.max(high[g], 0, keep_dims=True)
        shrink = tl.exp2(high[g] - highest)
        weight_sum = tl.sum(total[g] * shrink, 0, keep_dims=True)
        result = tl.sum(sums[g] * shrink, 0, keep_dims=True) / weight_sum
        part = (batch * CHUNKS + chunk) * HQ + head * GROUP + g + tl.zeros([1, 1], tl.int32)
        tl.store(lse + part, highest + tl.log2(weight_sum))
        tl.store(partial + part * D + tl.arange(0, D)[None, :], result)


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
    shared=None,
    PER: tl.constexpr = 1,
):
    """out [rows, HQ, D] from the parts of `attention_kernel`; PADDED is the power of two from CHUNKS on.

    A chunk has CHUNK rows, and twice as many up to DOUBLINGS times where CHUNKS of them do not reach the token. What a
    sequence does not have adds exact zeros. Programs [HQ, rows]. PER chunks in `shared` rows have one part.
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
    if shared is not None:
        common = tl.load(shared + batch) // size
        there = there & ((chunks < tl.cdiv(common, PER)) | (chunks >= common))
    gdc_wait(PDL)
    if slot >= 0:
        part = (batch * CHUNKS + chunks) * HQ + head
        logs = tl.load(lse + part, mask=there, other=-float("inf"))
        values = tl.load(partial + part[:, None] * D + columns[None, :], mask=there[:, None], other=0.0)
        share = tl.exp2(logs - tl.max(logs, 0))
        mixed = tl.sum(values * share[:, None], 0) / tl.sum(share, 0)
        tl.store(out + (batch * HQ + head) * D + columns, mixed.to(out.dtype.element_ty))
