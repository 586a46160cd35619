"""Attention of the tokens of a decode step, one a sequence, from their projected heads to parts of their output.

The plain twins: the head norm and the rotation in `models/families/qwen3.py` and `models/reference/rope.py`, the
cache write and the attention in `engine/attention/sdpa.py`. A program serves one KV head and one chunk of rows. It
begins to copy its first rows of the cache into shared memory before it waits: rows before the new one were written in
earlier steps. There they take no registers, so that programs of the kernels before and after it fit beside it.

W groups of threads (D / 8 threads each) have rows of their own: R of them at a time. Each group holds all query heads
of the KV head, a tuple, and keeps its own online softmax, so that nothing leaves a group before the very end. A thread
reads of shared memory what it copied there itself.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,unreachable"
import triton
import triton.language as tl

from engine.kernels.triton.gluon import async_copy, gl, jit
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait


@jit
def _fetch(
    keys,
    values,
    stage,
    cache_k,
    cache_v,
    table,
    head,
    first,
    end,
    R: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HKV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Begin to copy rows of K and V from row `first` of a block table on, R times W; zeros from row `end` on."""
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0)
    if BLOCK % (W * R) == 0:  # all rows lie in one block
        block = gl.load(table + first // BLOCK, mask=first < end, other=0).to(tl.int64)
    group = first + gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    places = ()  # of all, before the first is copied: what reads a block table waits for it
    for i in tl.static_range(R):
        rows = group + i * W
        if BLOCK % (W * R) == 0:
            places += (block * BLOCK + rows % BLOCK,)
        else:
            blocks = gl.load(table + rows // BLOCK, mask=rows < end, other=0).to(tl.int64)
            places += (blocks * BLOCK + rows % BLOCK,)
    for i in tl.static_range(R):
        at = (gl.expand_dims(places[i], 1) * HKV + head) * D + columns
        seen = gl.expand_dims(group + i * W < end, 1)
        async_copy.async_copy_global_to_shared(keys[i].index(stage), cache_k + at, mask=seen)
        async_copy.async_copy_global_to_shared(values[i].index(stage), cache_v + at, mask=seen)
    async_copy.commit_group()


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


@jit
def _attend(
    q,
    keys,
    values,
    stage,
    left,
    high,
    total,
    sums,
    scale_log2,
    R: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One step of the online softmax: of each query head [W, D] with R times W rows of K and V, `left` rows in all.

    State, for each query head: the highest score and the sum of the weights [W], that of the weighted values [W, D].
    """
    G: tl.constexpr = len(q)
    group = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    scores = ()
    for i in tl.static_range(R):
        k = keys[i].index(stage).load(ROWS).to(tl.float32)
        for g in tl.static_range(G):
            score = gl.sum(q[g] * k, 1) * scale_log2
            scores += (gl.where(i * W + group < left, score, float("-inf")),)
    bases, new_high, new_total, new_sums = (), (), (), ()
    for g in tl.static_range(G):
        highest = high[g]
        for i in tl.static_range(R):
            highest = gl.maximum(highest, scores[i * G + g])
        base = gl.where(highest == float("-inf"), 0.0, highest)
        shrink = gl.exp2(high[g] - base)
        bases += (base,)
        new_high += (highest,)
        new_total += (total[g] * shrink,)
        new_sums += (sums[g] * gl.expand_dims(shrink, 1),)
    for i in tl.static_range(R):
        v = values[i].index(stage).load(ROWS).to(tl.float32)
        added_total, added_sums = (), ()
        for g in tl.static_range(G):
            weight = gl.exp2(scores[i * G + g] - bases[g])
            added_total += (new_total[g] + weight,)
            added_sums += (new_sums[g] + gl.expand_dims(weight, 1) * v,)
        new_total, new_sums = added_total, added_sums
    return new_high, new_total, new_sums


# Another longest context must not compile the kernel again.
@jit(do_not_specialize=["table_stride", "begin", "end"])
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
    WARPS: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
    shared=None,
):
    """Write K and V of each new token and attend with its query heads to the rows of its sequence up to it.

    heads [rows, HQ + 2 HKV, D]: q, k and v as projected; norm_weight [HQ + HKV, D]; rotary [positions, D]: cos
    beside sin; cache_k and cache_v [places, HKV, D]; active int32 [rows]: the slot of each, -1 for none; tables
    int32 [slots, table_stride]; counters int64 [slots, 2]: the row of the token in its sequence, then its position.
    Programs [HKV, chunks, rows]; one takes a chunk: TILES tiles of R rows for every group of a sequence, STAGES of
    them in shared memory. SPARE times as much as a group row of all groups takes is taken and not used, so that no more
    programs fit on a multiprocessor than have to. A program leaves its output in partial fp32 [rows, CHUNKS, HQ, D] and
    log2 of the sum of its weights in lse fp32 [rows, CHUNKS, HQ]; programs beyond the last row leave nothing.
    `combine_kernel` puts the chunks together.

    With SOME, only tokens in rows `begin` to `end` of their sequences are served: a launch for each way of cutting
    sequences into chunks, since a sequence must be cut as if it were alone.

    shared int32 [rows]: the chunks that lie wholly in so many first rows are left to `shared_prefix.py`; the first
    program of a sequence takes the one behind them.
    """
    gdc_launch_dependents(PDL)
    head = gl.program_id(0)
    chunk = gl.program_id(1)
    batch = gl.program_id(2)
    dtype: tl.constexpr = heads.dtype.element_ty
    GROUP: tl.constexpr = HQ // HKV
    LANES: tl.constexpr = D // 8
    W: tl.constexpr = WARPS * 32 // LANES
    TILE: tl.constexpr = W * R
    ROWS: tl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    MERGE: tl.constexpr = gl.BlockedLayout([W, 1], [1, 32], [1, WARPS], [1, 0])
    PLAIN: tl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    if shared is not None:
        chunk += gl.load(shared + batch) // (TILE * TILES)
    slot = gl.load(active + batch)
    row = gl.load(counters + 2 * slot, mask=slot >= 0, other=-1).to(tl.int32)
    first = chunk * TILE * TILES
    idle = first > row
    if SOME:
        idle = idle | (row < begin) | (row >= end)
    if idle:
        gdc_wait(
            PDL
        )  # where some programs ended before others began to wait, a step took up to a tenth longer
        return
    position = gl.load(counters + 2 * slot + 1)
    table = tables + slot.to(tl.int64) * table_stride
    heads += batch * (HQ + 2 * HKV) * D
    end_of_chunk = tl.minimum(row, first + TILE * TILES)
    keys = (gl.allocate_shared_memory(cache_k.dtype.element_ty, [STAGES + SPARE, W, D], PLAIN),)
    for _ in tl.static_range(R - 1):
        keys += (gl.allocate_shared_memory(cache_k.dtype.element_ty, [STAGES, W, D], PLAIN),)
    values = ()
    for _ in tl.static_range(R):
        values += (gl.allocate_shared_memory(cache_v.dtype.element_ty, [STAGES, W, D], PLAIN),)
    for i in tl.static_range(STAGES):
        _fetch(
            keys,
            values,
            i,
            cache_k,
            cache_v,
            table,
            head,
            first + i * TILE,
            end_of_chunk,
            R,
            W,
            D,
            BLOCK,
            HKV,
            ROWS,
        )
    place = gl.load(table + row // BLOCK).to(tl.int64) * BLOCK + row % BLOCK

    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0) + gl.zeros(
        [W, 1], tl.int32, layout=ROWS
    )
    others = (columns + D // 2) % D
    cosine = gl.load(rotary + position * D + columns % (D // 2)).to(tl.float32)
    sine = gl.load(rotary + position * D + D // 2 + columns % (D // 2)).to(tl.float32)
    sine = gl.where(columns < D // 2, -sine, sine)
    # Query heads, then the key head: where they are, and their weights.
    weights, other_weights = (), ()
    for g in tl.static_range(GROUP + 1):
        at = (head * GROUP + g if g < GROUP else HQ + head) * D
        if NORM:
            weights += (gl.load(norm_weight + at + columns),)
            other_weights += (gl.load(norm_weight + at + others),)
    # What was loaded so far are weights and rows of earlier steps.
    gdc_wait(PDL)
    new_v = gl.load(heads + (HQ + HKV + head) * D + columns)
    lines, other_lines, placed = (), (), ()
    for g in tl.static_range(GROUP + 1):
        at = (head * GROUP + g if g < GROUP else HQ + head) * D
        lines += (gl.load(heads + at + columns),)
        other_lines += (gl.load(heads + at + others),)
    for g in tl.static_range(GROUP + 1):
        x, other = lines[g].to(tl.float32), other_lines[g].to(tl.float32)
        if NORM:
            other = norm_heads(other, x, other_weights[g], D, EPS)
            x = norm_heads(x, x, weights[g], D, EPS)
        placed += (rotate(x, other, cosine, sine, dtype),)
    new_k = placed[GROUP]

    # The new row is the first that group 0 of its chunk sees.
    group = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    here = row < first + TILE * TILES
    mine = here & (group == 0)
    q, high, total, sums = (), (), (), ()
    for g in tl.static_range(GROUP):
        x = placed[g].to(tl.float32)
        score = gl.sum(x * new_k.to(tl.float32), 1) * scale_log2
        q += (x,)
        high += (gl.where(mine, score, float("-inf")),)
        total += (gl.where(mine, 1.0, 0.0),)
        sums += (gl.where(gl.expand_dims(mine, 1), new_v.to(tl.float32), 0.0),)
    if here:
        target = (place * HKV + head) * D + columns
        gl.store(cache_k + target, new_k, mask=gl.expand_dims(group, 1) == 0)
        gl.store(cache_v + target, new_v, mask=gl.expand_dims(group, 1) == 0)
    for i in range(TILES):
        async_copy.wait_group(STAGES - 1)
        start = first + i * TILE
        high, total, sums = _attend(
            q, keys, values, i % STAGES, row - start, high, total, sums, scale_log2, R, W, ROWS
        )
        if TILES > STAGES:
            _fetch(
                keys,
                values,
                i % STAGES,
                cache_k,
                cache_v,
                table,
                head,
                start + STAGES * TILE,
                end_of_chunk,
                R,
                W,
                D,
                BLOCK,
                HKV,
                ROWS,
            )
        elif TILES > 1:
            async_copy.commit_group()  # of nothing: the wait counts groups
    async_copy.wait_group(0)  # zeros from behind the chunk are on their way to what the groups meet in

    # The groups meet: a thread has a column of all of them.
    LINE: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    met = ()
    for g in tl.static_range(GROUP):
        met += (gl.allocate_shared_memory(tl.float32, [W], LINE, high[g]),)
        met += (gl.allocate_shared_memory(tl.float32, [W], LINE, total[g]),)
        met += (gl.allocate_shared_memory(tl.float32, [W, D], TABLE, sums[g]),)
    for g in tl.static_range(GROUP):
        own = met[3 * g].load(gl.SliceLayout(1, MERGE))
        highest = gl.max(own, 0)
        shrink = gl.exp2(own - highest)
        weight_sum = gl.sum(met[3 * g + 1].load(gl.SliceLayout(1, MERGE)) * shrink, 0)
        result = gl.sum(met[3 * g + 2].load(MERGE) * gl.expand_dims(shrink, 1), 0) / weight_sum
        part = (batch * CHUNKS + chunk) * HQ + head * GROUP + g
        gl.store(lse + part, highest + gl.log2(weight_sum))
        gl.store(partial + part * D + gl.arange(0, D, layout=gl.SliceLayout(0, MERGE)), result)


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
