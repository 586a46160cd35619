"""Attention of a decode step, with one token per sequence, from projected heads to partial outputs.

The plain twins: the head norm and the rotation in `models/reference/decoder.py` and `models/reference/rope.py`, the
cache write and the attention in `engine/attention/sdpa.py`. A program serves one KV head and one chunk of rows. It
starts to copy its first cache rows into shared memory before it waits for earlier kernels, because rows before the new
one were written in earlier steps. In shared memory they take no registers, so programs of the neighbouring kernels fit
beside it.

Each of W groups of D / 8 threads, 32 at most, handles its own rows, R of them at a time. Each group holds all query
heads of the KV head (or some of them, where wide heads would take too many registers), as a tuple, and keeps its own
online softmax, so the groups exchange nothing until the very end. A thread reads from shared memory only what it copied
there itself.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,unreachable"
# mypy: disable-error-code="has-type"
from typing import NamedTuple

import triton.language as tl

from engine.kernels.triton.gluon import async_copy, constexpr_function, gl, jit
from engine.kernels.triton.head_norms import norm_heads, unit_heads
from engine.kernels.triton.kv_rows import coded, decoded, row_scale
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import angles, capped, partners, query_scale, rotate, weighed


class Rows(NamedTuple):
    """How a program of `attention_kernel` reads rows of the cache, as one constant."""

    at_once: int
    groups: int
    width: int
    """The head's size rounded up to a power of two."""
    size: int
    block: int
    heads: int
    row_bytes: int
    """0 unless rows are quantised."""


@constexpr_function
def rows_of(*numbers):
    """Return the constant."""
    return Rows(*numbers)


@jit
def _fetch(held, cache, stage, table, head, first, end, oldest, C: tl.constexpr, ROWS: tl.constexpr):
    """Start copying at_once times groups rows of K and V from row `first` of a block table; zeros from row `end` on.

    Rows before `oldest` are zeros too, unless it is None. Of quantised rows the scales are copied as well: as many
    entries for K as there are rows at once, then those for V.
    """
    keys, values, scales = held
    cache_k, cache_v, k_scales, v_scales = cache
    R: tl.constexpr = C.at_once
    W: tl.constexpr = C.groups
    columns = gl.expand_dims(gl.arange(0, C.width, layout=gl.SliceLayout(0, ROWS)), 0)
    if C.block % (W * R) == 0:  # all rows lie in one block
        block = gl.load(table + first // C.block, mask=first < end, other=0).to(tl.int64)
    group = first + gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    places = ()  # computed before any copy, because reading the block table stalls
    for i in tl.static_range(R):
        rows = group + i * W
        if C.block % (W * R) == 0:
            places += (block * C.block + rows % C.block,)
        else:
            blocks = gl.load(table + rows // C.block, mask=rows < end, other=0).to(tl.int64)
            places += (blocks * C.block + rows % C.block,)
    for i in tl.static_range(R):
        if C.row_bytes > 0:
            at = gl.expand_dims(places[i], 1) * C.row_bytes + head * C.size + columns
        else:
            at = (gl.expand_dims(places[i], 1) * C.heads + head) * C.size + columns
        seen = gl.expand_dims(group + i * W < end, 1)
        if oldest is not None:
            seen = seen & gl.expand_dims(group + i * W >= oldest, 1)
        if C.row_bytes > 0:
            one = places[i] * (C.row_bytes // 4) + head
            real = group + i * W < end
            if oldest is not None:
                real = real & (group + i * W >= oldest)
            async_copy.async_copy_global_to_shared(scales[i].index(stage), k_scales + one, mask=real)
            async_copy.async_copy_global_to_shared(scales[R + i].index(stage), v_scales + one, mask=real)
        if C.size < C.width:
            seen = seen & (columns < C.size)
        async_copy.async_copy_global_to_shared(keys[i].index(stage), cache_k + at, mask=seen)
        async_copy.async_copy_global_to_shared(values[i].index(stage), cache_v + at, mask=seen)
    async_copy.commit_group()


@jit
def _line(at, columns, place, D: tl.constexpr, DIM: tl.constexpr):
    """Load the number in the given column of a head for each `place` of D; zero for places from DIM on."""
    return gl.load(at + columns) if DIM == D else gl.load(at + columns, mask=place < DIM, other=0.0)


@jit
def _scale_of_all(
    heads, first: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the factor of RMSNorm for COUNT heads from head `first` on that share one norm."""
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0)
    group = gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(1, ROWS)), 1)
    squares = gl.zeros([W, D], tl.float32, layout=ROWS)
    for i in tl.static_range((COUNT + W - 1) // W):
        there = (i * W + group < COUNT) & (columns < DIM)
        line = gl.load(heads + (first + i * W + group) * DIM + columns, mask=there, other=0.0).to(tl.float32)
        squares += line * line
    return gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / (COUNT * DIM) + EPS)


@jit
def _stored(
    rows, scales, place, head, columns, group, HKV: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Load the row of a head at one place of the cache, and decode it if it is quantised."""
    there = columns < DIM
    if ROW > 0:
        numbers = decoded(gl.load(rows + place * ROW + head * DIM + columns, mask=there, other=0), FP8)
        found = numbers * gl.expand_dims(gl.load(scales + place * (ROW // 4) + head + group * 0), 1)
    else:
        found = gl.load(rows + (place * HKV + head) * DIM + columns, mask=there, other=0.0)
    return found


@jit
def _attend(
    q,
    keys,
    values,
    stage,
    left,
    before,
    high,
    total,
    sums,
    scale_log2,
    CAP_LOG2: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    scales,
    FP8: tl.constexpr,
):
    """Run a step of the online softmax: each query head [W, D] with R times W rows of K and V, of which `left` exist.

    The first `before` of them are masked, unless it is None. The state of each query head is the highest score and the
    sum of the weights, [W] each, and the sum of the weighted values [W, D].
    """
    G: tl.constexpr = len(q)
    group = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    scores = ()
    for i in tl.static_range(R):
        k = keys[i].index(stage).load(ROWS)
        factor = scale_log2
        if len(scales) > 0:
            k = decoded(k, FP8)
            factor *= scales[i].index(stage).load(gl.SliceLayout(1, ROWS))
        else:
            k = k.to(tl.float32)
        for g in tl.static_range(G):
            score = capped(gl.sum(q[g] * k, 1) * factor, CAP_LOG2)
            seen = i * W + group < left
            if before is not None:
                seen = seen & (i * W + group >= before)
            scores += (gl.where(seen, score, float("-inf")),)
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
        v = values[i].index(stage).load(ROWS)
        if len(scales) > 0:
            v = decoded(v, FP8)
            shrunk = scales[R + i].index(stage).load(gl.SliceLayout(1, ROWS))
        else:
            v = v.to(tl.float32)
        added_total, added_sums = (), ()
        for g in tl.static_range(G):
            weight = gl.exp2(scores[i * G + g] - bases[g])
            added_total += (new_total[g] + weight,)
            if len(scales) > 0:
                weight *= shrunk
            added_sums += (new_sums[g] + gl.expand_dims(weight, 1) * v,)
        new_total, new_sums = added_total, added_sums
    return new_high, new_total, new_sums


# A different longest context must not recompile the kernel.
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
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
    PAIRS: tl.constexpr = False,
    EXACT: tl.constexpr = False,
    WINDOW: tl.constexpr = 0,
    CAP_LOG2: tl.constexpr = 0.0,
    TOGETHER: tl.constexpr = False,
    OFFSET: tl.constexpr = 0.0,
    ONCE: tl.constexpr = False,
    LATER: tl.constexpr = False,
    BETA: tl.constexpr = 0.0,
    ORIGINAL: tl.constexpr = 1,
    k_scales=None,
    v_scales=None,
    ROW: tl.constexpr = 0,
    FP8: tl.constexpr = False,
    START: tl.constexpr = "at once",
    SPLITS: tl.constexpr = 1,
    V_EPS: tl.constexpr = None,
    V_IS_K: tl.constexpr = False,
    STORED: tl.constexpr = False,
):
    """Write K and V of each new token, and attend with its query heads to the rows of its sequence up to it.

    heads [rows, HQ + 2 HKV, DIM]: q, k and v as projected; norm_weight [HQ + HKV, DIM]; rotary [positions, ROTATED]:
    cos beside sin; cache_k and cache_v [places, HKV, DIM]; active int32 [rows]: the slot of each row, -1 for none;
    tables int32 [slots, table_stride]; counters int64 [slots, 2]: the row of the token in its sequence, then its
    position. The grid is [HKV, chunks, rows]. A program takes one chunk: TILES tiles of R rows for each group, STAGES
    of them in shared memory. SPARE times the size of one row for every group is allocated but unused, so that no more
    programs than necessary fit on a multiprocessor. A program writes its output to partial fp32 [rows, CHUNKS, HQ, DIM]
    and log2 of the sum of its weights to lse fp32 [rows, CHUNKS, HQ]; programs beyond the last row write nothing.
    `combine_kernel` combines the chunks.

    With SOME, a launch serves only tokens in rows `begin` to `end` of their sequences. There is one launch for each way
    of cutting sequences into chunks, since a sequence must be cut as if it were alone.

    D is DIM rounded up to a power of two. The first ROTATED numbers of q and k are rotated (0: none); with PAIRS,
    neighbours together; with EXACT, in fp32. With NORM, each head is normed first, or with TOGETHER all of q and all of
    k, or with LATER each head afterwards. OFFSET and ONCE are as in `weighed`. With WINDOW, a token sees that many rows
    including its own, and the first program of a sequence takes the chunk of the oldest one; 0 means all rows. CAP_LOG2
    caps scores, in units of log2. With BETA, queries are multiplied by their `query_scale`.

    SPLITS programs divide the query heads of a KV head; the grid is then [HKV * SPLITS, chunks, rows]. With V_EPS, V is
    normed by that epsilon. With V_IS_K, heads have no V: it is the k that was projected. With STORED, they have neither
    k nor V, which an earlier layer has written into the same cache: [rows, HQ, DIM], norm_weight [HQ, DIM].

    With ROW, the cache has quantised rows of that many bytes (see `kv_rows.py`); the new row, too, is attended to as it
    is stored.

    START says when the next kernel may start and begin to copy its weights: "at once", when this kernel has "looked up"
    the places of the sequence, or when it has "waited".
    """
    if START == "at once":
        gdc_launch_dependents(PDL)
    head = gl.program_id(0) // SPLITS
    chunk = gl.program_id(1)
    batch = gl.program_id(2)
    dtype: tl.constexpr = heads.dtype.element_ty
    GROUP: tl.constexpr = HQ // HKV // SPLITS
    PLACED: tl.constexpr = GROUP if STORED else GROUP + 1
    V_AT: tl.constexpr = HQ if V_IS_K else HQ + HKV
    HEADS: tl.constexpr = HQ if STORED else V_AT + HKV
    LANES: tl.constexpr = D // 8 if D <= 256 else 32
    W: tl.constexpr = WARPS * 32 // LANES
    TILE: tl.constexpr = W * R
    ROWS: tl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    MERGE: tl.constexpr = gl.BlockedLayout([W, 1], [1, 32], [1, WARPS], [1, 0])
    PLAIN: tl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    place_of_part = chunk
    lead = gl.program_id(0) * GROUP
    slot = gl.load(active + batch)
    row = gl.load(counters + 2 * slot, mask=slot >= 0, other=-1).to(tl.int32)
    oldest = None
    if WINDOW > 0:
        oldest = gl.maximum(row - (WINDOW - 1), 0)
        chunk += oldest // (TILE * TILES)
    first = chunk * TILE * TILES
    idle = first > row
    if SOME:
        idle = idle | (row < begin) | (row >= end)
    if START == "looked up":
        gdc_launch_dependents(PDL)
    if idle:
        gdc_wait(PDL)  # if some programs ended before others began to wait, a step took up to a tenth longer
        if START == "waited":
            gdc_launch_dependents(PDL)
        return
    position = gl.load(counters + 2 * slot + 1)
    table = tables + slot.to(tl.int64) * table_stride
    heads += batch * HEADS * DIM
    end_of_chunk = tl.minimum(row, first + TILE * TILES)
    keys = (gl.allocate_shared_memory(cache_k.dtype.element_ty, [STAGES + SPARE, W, D], PLAIN),)
    for _ in tl.static_range(R - 1):
        keys += (gl.allocate_shared_memory(cache_k.dtype.element_ty, [STAGES, W, D], PLAIN),)
    values = ()
    for _ in tl.static_range(R):
        values += (gl.allocate_shared_memory(cache_v.dtype.element_ty, [STAGES, W, D], PLAIN),)
    scales = ()
    if ROW > 0:
        FLAT: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        for _ in tl.static_range(2 * R):
            scales += (gl.allocate_shared_memory(tl.float32, [STAGES, W], FLAT),)
    C: tl.constexpr = rows_of(R, W, D, DIM, BLOCK, HKV, ROW)
    held = keys, values, scales
    cache = cache_k, cache_v, k_scales, v_scales
    for i in tl.static_range(STAGES):
        _fetch(held, cache, i, table, head, first + i * TILE, end_of_chunk, oldest, C, ROWS)
    place = gl.load(table + row // BLOCK).to(tl.int64) * BLOCK + row % BLOCK

    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0) + gl.zeros(
        [W, 1], tl.int32, layout=ROWS
    )
    group = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    others = partners(columns, ROTATED, DIM, PAIRS)
    if ROTATED > 0:
        cosine, sine = angles(rotary + position * ROTATED, columns, ROTATED, DIM, PAIRS)
    # Query heads, then the key head unless it is STORED: their offsets and weights.
    weights, other_weights = (), ()
    for g in tl.static_range(PLACED):
        at = (lead + g if g < GROUP else HQ + head) * DIM
        if NORM:
            weights += (_line(norm_weight + at, columns, columns, D, DIM),)
            if ROTATED > 0 and not LATER:
                other_weights += (_line(norm_weight + at, others, columns, D, DIM),)
    # Everything loaded so far is weights or rows of earlier steps.
    gdc_wait(PDL)
    if START == "waited":
        gdc_launch_dependents(PDL)
    if STORED:
        new_k = _stored(cache_k, k_scales, place, head, columns, group, HKV, DIM, ROW, FP8)
        new_v = _stored(cache_v, v_scales, place, head, columns, group, HKV, DIM, ROW, FP8)
    else:
        new_v = _line(heads + (V_AT + head) * DIM, columns, columns, D, DIM)
        if V_EPS is not None:
            new_v = unit_heads(new_v, DIM, V_EPS)
    lines, other_lines, placed = (), (), ()
    for g in tl.static_range(PLACED):
        at = (lead + g if g < GROUP else HQ + head) * DIM
        lines += (_line(heads + at, columns, columns, D, DIM),)
        if ROTATED > 0:
            other_lines += (_line(heads + at, others, columns, D, DIM),)
    if TOGETHER:
        q_scale = _scale_of_all(heads, 0, HQ, D, DIM, EPS, W, ROWS)
        k_scale = q_scale
        if not STORED:
            k_scale = _scale_of_all(heads, HQ, HKV, D, DIM, EPS, W, ROWS)
    for g in tl.static_range(PLACED):
        x = lines[g].to(tl.float32)
        if ROTATED > 0:
            other = other_lines[g].to(tl.float32)
            if TOGETHER:
                other = weighed(other, q_scale if g < GROUP else k_scale, other_weights[g], OFFSET, ONCE).to(
                    tl.float32
                )
            elif NORM and not LATER:
                other = norm_heads(other, x, other_weights[g], DIM, EPS, OFFSET, ONCE)
        if TOGETHER:
            x = weighed(x, q_scale if g < GROUP else k_scale, weights[g], OFFSET, ONCE).to(tl.float32)
        elif NORM and not LATER:
            x = norm_heads(x, x, weights[g], DIM, EPS, OFFSET, ONCE)
        x = rotate(x, other, cosine, sine, dtype, EXACT) if ROTATED > 0 else x.to(dtype)
        if LATER:
            x = norm_heads(x.to(tl.float32), x.to(tl.float32), weights[g], DIM, EPS, OFFSET, ONCE).to(dtype)
        if BETA > 0.0 and g < GROUP:
            x = (x.to(tl.float32) * query_scale(position, BETA, ORIGINAL, dtype)).to(dtype)
        placed += (x,)
    if not STORED:
        new_k = placed[GROUP]
    if ROW > 0 and not STORED:
        new_k = new_k.to(tl.float32)
        new_v = new_v.to(tl.float32)
        k_scale, k_inverse = row_scale(gl.max(gl.where(new_k < 0.0, -new_k, new_k), 1), FP8)
        v_scale, v_inverse = row_scale(gl.max(gl.where(new_v < 0.0, -new_v, new_v), 1), FP8)
        k_codes = coded(new_k, gl.expand_dims(k_inverse, 1), FP8)
        v_codes = coded(new_v, gl.expand_dims(v_inverse, 1), FP8)
        new_k = decoded(k_codes, FP8) * gl.expand_dims(k_scale, 1)
        new_v = decoded(v_codes, FP8) * gl.expand_dims(v_scale, 1)

    # The new row is the first one that group 0 of its chunk sees.
    here = row < first + TILE * TILES
    mine = here & (group == 0)
    q, high, total, sums = (), (), (), ()
    for g in tl.static_range(GROUP):
        x = placed[g].to(tl.float32)
        score = capped(gl.sum(x * new_k.to(tl.float32), 1) * scale_log2, CAP_LOG2)
        q += (x,)
        high += (gl.where(mine, score, float("-inf")),)
        total += (gl.where(mine, 1.0, 0.0),)
        sums += (gl.where(gl.expand_dims(mine, 1), new_v.to(tl.float32), 0.0),)
    if not STORED:  # noqa: SIM102 - this is known when the kernel is compiled
        if here:
            written = gl.expand_dims(group, 1) == 0
            if SPLITS > 1:
                written = written & (gl.program_id(0) % SPLITS == 0)
            if DIM < D:
                written = written & (columns < DIM)
            if ROW > 0:
                target = place * ROW + head * DIM + columns
                gl.store(cache_k + target, k_codes.to(tl.uint8), mask=written)
                gl.store(cache_v + target, v_codes.to(tl.uint8), mask=written)
                one = place * (ROW // 4) + head + group
                first_group = (group == 0) & (gl.program_id(0) % SPLITS == 0)
                gl.store(k_scales + one, k_scale, mask=first_group)
                gl.store(v_scales + one, v_scale, mask=first_group)
            else:
                target = (place * HKV + head) * DIM + columns
                gl.store(cache_k + target, new_k, mask=written)
                gl.store(cache_v + target, new_v, mask=written)
    for i in range(TILES):
        async_copy.wait_group(STAGES - 1)
        start = first + i * TILE
        before = None
        if WINDOW > 0:
            before = oldest - start
        # fmt: off
        high, total, sums = _attend(
            q, keys, values, i % STAGES, row - start, before, high, total, sums, scale_log2, CAP_LOG2, R, W, ROWS,
            scales, FP8,
        )
        # fmt: on
        if TILES > STAGES:
            later = start + STAGES * TILE
            _fetch(held, cache, i % STAGES, table, head, later, end_of_chunk, oldest, C, ROWS)
        elif TILES > 1:
            async_copy.commit_group()  # empty, because the wait counts groups
    async_copy.wait_group(0)  # zeros from beyond the chunk may still be arriving in memory reused below

    # The groups are merged: each thread has a column of all of them.
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
        part = (batch * CHUNKS + place_of_part) * HQ + lead + g
        gl.store(lse + part, highest + gl.log2(weight_sum))
        if DIM == D:
            gl.store(partial + part * D + gl.arange(0, D, layout=gl.SliceLayout(0, MERGE)), result)
        else:
            column = gl.arange(0, D, layout=gl.SliceLayout(0, MERGE))
            gl.store(partial + part * DIM + column, result, mask=column < DIM)
