"""Attention of a decode step on tensor cores: all parts of it in one launch. `combine.py` combines them.

It serves sequences that share a prefix, models with many query heads per KV head, and many short sequences. The plain
twin is attention without sharing, `engine/attention/sdpa.py`. A tile is up to MEMBERS rows of the batch whose block
tables begin alike. Its query heads form one matrix for the tensor cores, so the shared rows are read once for all of
them. The rows that a sequence has alone are read for its own query heads. Both kinds are cut into parts of about the
same size, as many as run at once. A program copies the first tiles of its part into shared memory before it waits for
the previous kernel, and the others while it computes. "Hydragen: High-Throughput LLM Inference with Shared Prefixes"
(Juravsky et al. 2024).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,unreachable"
import triton.language as tl

from engine.kernels.triton.attention_bytes import (
    addresses,
    attend_bytes,
    copy_bytes,
    rounded,
    scale_exponent,
)
from engine.kernels.triton.combine import MOST_TILES, own_part, parts_of_tile, shared_part
from engine.kernels.triton.gluon import async_copy, gl, jit, mma_v2
from engine.kernels.triton.head_norms import norm_heads
from engine.kernels.triton.kv_bytes import byte_unit
from engine.kernels.triton.kv_rows import coded, decoded
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import angles, capped, partners, query_scale, rotate, weighed


@jit
def _copy(
    keys, values, stage, cache_k, cache_v, table, head, start, end,
    TILE: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HKV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Start copying TILE rows of K and V from row `start` of a block table; zeros from row `end` on."""
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0)
    local = gl.arange(0, TILE, layout=gl.SliceLayout(1, ROWS))
    k, v, at = addresses((cache_k, cache_v), table, start, end, local, BLOCK, TILE, HKV * DIM)
    at = gl.expand_dims(at, 1) + columns
    there = gl.expand_dims(local < end - start, 1) & (columns < DIM)
    async_copy.async_copy_global_to_shared(keys.index(stage), k + head * DIM + at, mask=there)
    async_copy.async_copy_global_to_shared(values.index(stage), v + head * DIM + at, mask=there)
    async_copy.commit_group()


@jit
def _scale_of_all(
    heads, batches, first: tl.constexpr, COUNT: tl.constexpr, real, columns, HQ: tl.constexpr, HKV: tl.constexpr,
    DIM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Return the factor of RMSNorm for COUNT heads from head `first` on that share one norm, for each lane."""
    squares = (batches * 0 + columns * 0).to(tl.float32)
    for g in range(COUNT):
        at = (batches * (HQ + 2 * HKV) + first + g) * DIM + columns
        numbers = gl.load(heads + at, mask=real & (columns < DIM), other=0.0).to(tl.float32)
        squares += numbers * numbers
    return gl.rsqrt(gl.expand_dims(gl.sum(squares, 1), 1) / (COUNT * DIM) + EPS)


@jit
def _constants(
    norm_weight, rotary, lines, positions, real, columns, DIM: tl.constexpr, ROTATED: tl.constexpr,
    NORM: tl.constexpr, PAIRS: tl.constexpr, BETA: tl.constexpr, ORIGINAL: tl.constexpr,
):  # fmt: skip
    """Load what is known before the wait about heads: cosine and sine, the norm's weights for them and their
    `partners`, and the scale of queries."""
    others = partners(columns, ROTATED, DIM, PAIRS)
    inside = real & (columns < DIM)
    cosine, sine, weight, other_weight, scale = (
        columns,
        columns,
        columns,
        columns,
        columns,
    )  # where not needed
    if ROTATED > 0:
        cosine, sine = angles(rotary + positions * ROTATED, columns, ROTATED, DIM, PAIRS)
    if NORM:
        weight = gl.load(norm_weight + lines * DIM + columns, mask=inside, other=0.0)
        other_weight = weight
        if ROTATED > 0:
            other_weight = gl.load(norm_weight + lines * DIM + others, mask=inside, other=0.0)
    if BETA > 0.0:
        scale = query_scale(positions, BETA, ORIGINAL, norm_weight.dtype.element_ty)
    return cosine, sine, weight, other_weight, scale


@jit
def _numbers(
    heads, batches, lines, real, columns, HQ: tl.constexpr, HKV: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Load heads and their `partners`, in fp32, zeros where not `real`."""
    inside = real & (columns < DIM)
    at = (batches * (HQ + 2 * HKV) + lines) * DIM
    x = gl.load(heads + at + columns, mask=inside, other=0.0).to(tl.float32)
    other = x
    if ROTATED > 0:
        others = partners(columns, ROTATED, DIM, PAIRS)
        other = gl.load(heads + at + others, mask=inside, other=0.0).to(tl.float32)
    return x, other


@jit
def _rotated(
    loaded, constants, heads, batches, real, columns, KEY: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr,
    DIM: tl.constexpr, ROTATED: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    TOGETHER: tl.constexpr, OFFSET: tl.constexpr, ONCE: tl.constexpr, LATER: tl.constexpr,
    BETA: tl.constexpr,
):  # fmt: skip
    """Return heads normed and rotated: those of keys, if KEY, or of queries, which are scaled."""
    x, other = loaded
    cosine, sine, weight, other_weight, query_factor = constants
    if TOGETHER:
        scale = _scale_of_all(
            heads, batches, HQ if KEY else 0, HKV if KEY else HQ, real, columns, HQ, HKV, DIM, EPS
        )
        other = weighed(other, scale, other_weight, OFFSET, ONCE).to(tl.float32)
        x = weighed(x, scale, weight, OFFSET, ONCE).to(tl.float32)
    elif NORM and not LATER:
        other = norm_heads(other, x, other_weight, DIM, EPS, OFFSET, ONCE)
        x = norm_heads(x, x, weight, DIM, EPS, OFFSET, ONCE)
    dtype: tl.constexpr = heads.dtype.element_ty
    x = rotate(x, other, cosine, sine, dtype, EXACT) if ROTATED > 0 else x.to(dtype)
    if LATER:
        x = norm_heads(x.to(tl.float32), x.to(tl.float32), weight, DIM, EPS, OFFSET, ONCE).to(dtype)
    if BETA > 0.0 and not KEY:
        x = (x.to(tl.float32) * query_factor).to(dtype)
    return x


@jit
def _attend(
    q, m, l, acc, keys, values, cache_k, cache_v, table, head, begin, end, scale_log2,  # noqa: E741 - as in the paper
    CAP_LOG2: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, HKV: tl.constexpr, ROWS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Run the online softmax of q [lanes, D] over rows `begin` to `end`; their first STAGES tiles are being copied.

    See `attend_tile` of `paged_attention.py`. m and l are [lanes], acc is [lanes, D], in the layout MMA.
    """
    LANES: tl.constexpr = q.shape[0]
    dtype: tl.constexpr = cache_v.dtype.element_ty
    Q: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    K: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    q = gl.convert_layout(q, Q)
    column = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, MMA)), 0)
    nothing = gl.zeros([LANES, TILE], tl.float32, layout=MMA)
    # Sums of weights stay separate by column until the end: that saves a reduction over all warps per tile.
    spread = gl.where(column == 0, gl.expand_dims(l, 1), nothing)
    stage = 0
    for start in range(begin, end, TILE):
        async_copy.wait_group(STAGES - 1)
        k = keys.index(stage).permute((1, 0)).load(K)
        scores = capped(mma_v2(q, k, nothing) * scale_log2, CAP_LOG2)
        scores = gl.where(column < end - start, scores, float("-inf"))
        highest = gl.maximum(m, gl.max(scores, 1))
        base = gl.where(highest == float("-inf"), 0.0, highest)
        weights = gl.exp2(scores - gl.expand_dims(base, 1))
        shrink = gl.exp2(m - base)
        m = highest
        spread = spread * gl.expand_dims(shrink, 1) + weights
        v = values.index(stage).load(K)
        acc = mma_v2(gl.convert_layout(weights.to(dtype), Q), v, acc * gl.expand_dims(shrink, 1))
        # fmt: off
        _copy(
            keys, values, stage, cache_k, cache_v, table, head, start + STAGES * TILE, end,
            TILE, D, DIM, BLOCK, HKV, ROWS,
        )
        # fmt: on
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    return m, gl.sum(spread, 1), acc


@jit
def _leave(partial, lse, at, real, m, l, sums, D: tl.constexpr, DIM: tl.constexpr, MMA: tl.constexpr):  # noqa: E741
    """Store the outputs of lanes, for which `sums` has all columns, or the even and the odd ones, as parts `at`."""
    COUNT: tl.constexpr = len(sums)
    gl.store(lse + at, m + gl.log2(l), mask=real)
    columns = COUNT * gl.expand_dims(gl.arange(0, D // COUNT, layout=gl.SliceLayout(0, MMA)), 0)
    at, inside = gl.expand_dims(at, 1) * DIM, gl.expand_dims(real, 1) & (columns < DIM)
    for i in tl.static_range(COUNT):
        mixed = sums[i] / gl.expand_dims(l, 1)
        gl.store(partial + at + (columns + i), mixed.to(partial.dtype.element_ty), mask=inside)


@jit
def _shared_part(
    heads, norm_weight, rotary, cache_k, cache_v, active, counters, table, members, partial, lse, scale_log2,
    head, chunk, chunks, begin, end, keys, values,
    HQ: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, MEMBERS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr,
    CAP_LOG2: tl.constexpr, TOGETHER: tl.constexpr, OFFSET: tl.constexpr, ONCE: tl.constexpr, LATER: tl.constexpr,
    BETA: tl.constexpr, ORIGINAL: tl.constexpr, ROWS: tl.constexpr, SHARED_MMA: tl.constexpr, scales, pairs,
    row_scales, ROW: tl.constexpr, FP8: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Attend to rows `begin` to `end`, which the members of a tile share, for all members."""
    GROUP: tl.constexpr = HQ // HKV
    COUNT: tl.constexpr = MEMBERS * G
    lane = gl.arange(0, COUNT, layout=gl.SliceLayout(1, ROWS))
    batches = gl.load(members + lane // G)
    slots = gl.load(active + batches, mask=batches >= 0, other=-1)
    positions = gl.expand_dims(gl.load(counters + 2 * slots + 1, mask=slots >= 0, other=0), 1)
    real = gl.expand_dims((slots >= 0) & (lane % G < GROUP), 1)
    lines = gl.expand_dims(head * GROUP + lane % G, 1)
    batches = gl.expand_dims(batches, 1)
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0)
    # fmt: off
    constants = _constants(
        norm_weight, rotary, lines, positions, real, columns, DIM, ROTATED, NORM, PAIRS, BETA, ORIGINAL
    )
    gdc_wait(PDL)
    q = _numbers(heads, batches, lines, real, columns, HQ, HKV, DIM, ROTATED, PAIRS)
    q = _rotated(
        q, constants, heads, batches, real, columns, False,
        HQ, HKV, DIM, ROTATED, EPS, NORM, EXACT, TOGETHER, OFFSET, ONCE, LATER, BETA,
    )
    m = gl.zeros([COUNT], tl.float32, layout=gl.SliceLayout(1, SHARED_MMA)) - float("inf")
    l = gl.zeros([COUNT], tl.float32, layout=gl.SliceLayout(1, SHARED_MMA))  # noqa: E741
    if ROW > 0:
        even = gl.zeros([COUNT, D // 2], tl.float32, layout=SHARED_MMA)
        m, l, even, odd = attend_bytes(  # noqa: E741
            q, m, l, even, even, keys, values, scales, pairs, row_scales, table, head, begin, end, scale_log2,
            CAP_LOG2, STAGES, TILE, D, DIM, BLOCK, ROW, FP8, WARPS, SHARED_MMA,
        )
    else:
        acc = gl.zeros([COUNT, D], tl.float32, layout=SHARED_MMA)
        m, l, acc = _attend(  # noqa: E741
            q, m, l, acc, keys, values, cache_k, cache_v, table, head, begin, end, scale_log2,
            CAP_LOG2, STAGES, TILE, D, DIM, BLOCK, HKV, ROWS, SHARED_MMA,
        )
    # fmt: on
    lane = gl.arange(0, COUNT, layout=gl.SliceLayout(1, SHARED_MMA))
    batches = gl.load(members + lane // G)
    slots = gl.load(active + batches, mask=batches >= 0, other=-1)
    real = (slots >= 0) & (lane % G < GROUP)
    at = (batches * chunks + chunk) * HQ + head * GROUP + lane % G
    _leave(partial, lse, at, real, m, l, (even, odd) if ROW > 0 else (acc,), D, DIM, SHARED_MMA)


@jit
def _own_part(
    heads, norm_weight, rotary, cache_k, cache_v, counters, table, partial, lse, scale_log2,
    head, chunk, chunks, begin, end, keys, values, batch, slot, row, newest,
    HQ: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr, CAP_LOG2: tl.constexpr,
    TOGETHER: tl.constexpr, OFFSET: tl.constexpr, ONCE: tl.constexpr, LATER: tl.constexpr, BETA: tl.constexpr,
    ORIGINAL: tl.constexpr, ROWS: tl.constexpr, OWN_MMA: tl.constexpr, scales, pairs, row_scales, ROW: tl.constexpr,
    FP8: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Attend to rows `begin` to `end`, which a sequence has alone, and to its new row if the part is the `newest`."""
    GROUP: tl.constexpr = HQ // HKV
    NUMBER: tl.constexpr = 16 if G < 16 else G
    lane = gl.expand_dims(gl.arange(0, NUMBER, layout=gl.SliceLayout(1, ROWS)), 1)
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0)
    position = gl.load(counters + 2 * slot + 1)
    place = gl.load(table + row // BLOCK).to(tl.int64) * BLOCK + row % BLOCK
    value = heads + (batch * (HQ + 2 * HKV) + HQ + HKV + head) * DIM
    real, lines = lane < GROUP, head * GROUP + lane
    # fmt: off
    constants = _constants(
        norm_weight, rotary, lines, position, real, columns, DIM, ROTATED, NORM, PAIRS, BETA, ORIGINAL
    )
    of_key = _constants(norm_weight, rotary, HQ + head, position, True, columns, DIM, ROTATED, NORM, PAIRS, 0.0, 1)
    gdc_wait(PDL)
    # Everything is requested before anything is used: a warp waits for what it uses first.
    q = _numbers(heads, batch, lines, real, columns, HQ, HKV, DIM, ROTATED, PAIRS)
    new_k = _numbers(heads, batch, HQ + head, True, columns, HQ, HKV, DIM, ROTATED, PAIRS)
    new_v = gl.load(value + columns, mask=columns < DIM, other=0.0)
    if ROW > 0:
        own_columns = 2 * gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, OWN_MMA)), 0)
        even = gl.load(value + own_columns, mask=own_columns < DIM, other=0.0).to(tl.float32)
        odd = gl.load(value + own_columns + 1, mask=own_columns < DIM, other=0.0).to(tl.float32)
    else:
        own_columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, OWN_MMA)), 0)
        own_v = gl.load(value + own_columns, mask=own_columns < DIM, other=0.0).to(tl.float32)
    new_k = _rotated(
        new_k, of_key, heads, batch, True, columns, True,
        HQ, HKV, DIM, ROTATED, EPS, NORM, EXACT, TOGETHER, OFFSET, ONCE, LATER, BETA,
    )
    q = _rotated(
        q, constants, heads, batch + lane * 0, real, columns, False,
        HQ, HKV, DIM, ROTATED, EPS, NORM, EXACT, TOGETHER, OFFSET, ONCE, LATER, BETA,
    )
    # fmt: on
    written, stored_k, stored_v = newest & (columns < DIM), new_k, new_v
    new_k = new_k.to(tl.float32)
    if ROW > 0:
        target = place * ROW + head * DIM
        k_codes, k_scale, _, new_k = rounded(new_k, FP8)
        v_codes, v_scale, v_inverse, _ = rounded(new_v.to(tl.float32), FP8)
        stored_k, stored_v = k_codes.to(tl.uint8), v_codes.to(tl.uint8)
        gl.store(row_scales[0] + place * (ROW // 4) + head, k_scale, mask=newest)
        gl.store(row_scales[1] + place * (ROW // 4) + head, v_scale, mask=newest)
    else:
        target = (place * HKV + head) * DIM
    gl.store(cache_k + target + columns, stored_k, mask=written)
    gl.store(cache_v + target + columns, stored_v, mask=written)
    score = capped(gl.sum(q.to(tl.float32) * new_k, 1) * scale_log2, CAP_LOG2)
    score = gl.convert_layout(score, gl.SliceLayout(1, OWN_MMA))
    one = score * 0.0 + 1.0
    if ROW > 0:
        order = scale_exponent(v_scale * byte_unit(FP8))
        score, one = score + order, one * gl.exp2(-order)
    m, l = gl.where(newest, score, float("-inf")), gl.where(newest, one, 0.0)  # noqa: E741
    if ROW > 0:
        even = decoded(coded(even, v_inverse, FP8), FP8) * (v_scale * gl.exp2(-order))
        odd = decoded(coded(odd, v_inverse, FP8), FP8) * (v_scale * gl.exp2(-order))
        nothing = gl.zeros([NUMBER, D // 2], tl.float32, layout=OWN_MMA)
        even, odd = nothing + gl.where(newest, even, 0.0), nothing + gl.where(newest, odd, 0.0)
        # fmt: off
        m, l, even, odd = attend_bytes(  # noqa: E741
            q, m, l, even, odd, keys, values, scales, pairs, row_scales, table, head, begin, end, scale_log2,
            CAP_LOG2, STAGES, TILE, D, DIM, BLOCK, ROW, FP8, WARPS, OWN_MMA,
        )
        # fmt: on
    else:
        acc = gl.zeros([NUMBER, D], tl.float32, layout=OWN_MMA) + gl.where(newest, own_v, 0.0)
        # fmt: off
        m, l, acc = _attend(  # noqa: E741
            q, m, l, acc, keys, values, cache_k, cache_v, table, head, begin, end, scale_log2,
            CAP_LOG2, STAGES, TILE, D, DIM, BLOCK, HKV, ROWS, OWN_MMA,
        )
        # fmt: on
    line = gl.arange(0, NUMBER, layout=gl.SliceLayout(1, OWN_MMA))
    at = (batch * chunks + chunk) * HQ + head * GROUP + line
    _leave(partial, lse, at, line < GROUP, m, l, (even, odd) if ROW > 0 else (acc,), D, DIM, OWN_MMA)


# A different longest context, or more unshared rows, must not recompile the kernel.
@jit(do_not_specialize=["table_stride", "rows", "tiles", "chunks", "parts", "own", "least", "usual"])
def parts_kernel(
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
    shared,
    members,
    rows,
    tiles,
    chunks,
    parts,
    own,
    least,
    usual,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
    PAIRS: tl.constexpr = False,
    EXACT: tl.constexpr = False,
    CAP_LOG2: tl.constexpr = 0.0,
    TOGETHER: tl.constexpr = False,
    OFFSET: tl.constexpr = 0.0,
    ONCE: tl.constexpr = False,
    LATER: tl.constexpr = False,
    BETA: tl.constexpr = 0.0,
    ORIGINAL: tl.constexpr = 1,
    k_scales=None,
    v_scales=None,
    k_pairs=None,
    v_pairs=None,
    ROW: tl.constexpr = 0,
    FP8: tl.constexpr = False,
    START: tl.constexpr = "at once",
):
    """Write K and V of each new token, and attend to the shared and the unshared rows of its sequence.

    Arguments are as for `attention_kernel`. shared int32 [rows]: how many rows a sequence shares with its tile, a
    multiple of BLOCK; members int32 [tiles, MEMBERS]: rows of the batch, -1 for none, with real members first in a tile
    and used tiles first. G is the query heads per KV head, rounded up to a power of two. The grid is [HKV, parts + n *
    rows].

    The used tiles divide the first `parts` programs among them, at most chunks - own each. Then come up to n parts of
    each sequence's unshared rows; the last part has the new row. `own_part` cuts these into up to `own` parts; n is
    smaller if no sequence is long enough. The output goes to partial fp32 [rows, chunks, HQ, DIM] and
    lse fp32 [rows, chunks, HQ], unshared parts first, shared ones from `own` on; `combine_parts_kernel` combines them.
    Where `own` and `chunks` are 1 and nothing is shared, partial may be the step's output, in its dtype.
    A part is read TILE rows at a time, with STAGES tiles in flight. HALVES is the number of groups of warps that divide
    the lanes of a tile; the warps of a group divide its rows. k_pairs and v_pairs: the bytes of quantised rows, two per
    int16. START is "at once" or "looked up", as in `attention_kernel`.
    """
    if START == "at once":
        gdc_launch_dependents(PDL)
    head = gl.program_id(0)
    place = gl.program_id(1)
    LANES: tl.constexpr = D // 8
    ROWS: tl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    SHARED_MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[HALVES, WARPS // HALVES], instr_shape=[16, 8]
    )
    OWN_MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    HELD: tl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    together = place < parts
    if together:
        tile = gl.arange(0, MOST_TILES, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
        leaders = gl.load(members + tile * MEMBERS, mask=tile < tiles, other=-1)
        used = gl.sum((leaders >= 0).to(tl.int32), 0)
        each = parts_of_tile(used, parts, chunks, own)
        members += place % tl.maximum(used, 1) * MEMBERS
        part = place // tl.maximum(used, 1)
        batch = gl.load(members)
        slot = gl.load(active + batch, mask=batch >= 0, other=-1)
        limit = gl.load(shared + batch, mask=slot >= 0, other=0)
        size = shared_part(limit, each)
        begin = part * size
        row = limit
        newest = False
        idle = (part >= each) | (begin >= limit)
        chunk = own + part
    else:
        batch = (place - parts) % rows
        part = (place - parts) // rows
        slot = gl.load(active + batch)
        row = gl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32)
        common = gl.load(shared + batch)
        size = own_part(row - common, own, least, usual)
        begin = common + part * size
        limit = row
        newest = row <= begin + size
        idle = (slot < 0) | ((part > 0) & (begin >= row))
        chunk = part
    if START == "looked up":
        gdc_launch_dependents(PDL)
    if idle:
        gdc_wait(PDL)
        return
    end = tl.minimum(begin + size, limit)
    table = tables + slot.to(tl.int64) * table_stride
    scales, pairs, row_scales = (), (), ()
    if ROW > 0:
        WIDE: tl.constexpr = D > 64
        NARROW: tl.constexpr = gl.SwizzledSharedLayout(8, 1 if WIDE else 2, 8 if WIDE else 4, [1, 0])
        LINE: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        keys = gl.allocate_shared_memory(tl.int16, [STAGES, TILE, D // 2], NARROW)
        values = gl.allocate_shared_memory(tl.int16, [STAGES, TILE, D // 2], NARROW)
        for _ in tl.static_range(2):
            scales += (gl.allocate_shared_memory(tl.float32, [STAGES, TILE], LINE),)
        pairs, row_scales = (k_pairs, v_pairs), (k_scales, v_scales)
    else:
        keys = gl.allocate_shared_memory(cache_k.dtype.element_ty, [STAGES, TILE, D], HELD)
        values = gl.allocate_shared_memory(cache_v.dtype.element_ty, [STAGES, TILE, D], HELD)
    for i in tl.static_range(STAGES):
        # fmt: off
        if ROW > 0:
            copy_bytes(
                keys, values, scales, i, pairs, row_scales, table, head, begin + i * TILE, end,
                TILE, D, DIM, BLOCK, ROW, WARPS,
            )
        else:
            _copy(
                keys, values, i, cache_k, cache_v, table, head, begin + i * TILE, end, TILE, D, DIM, BLOCK, HKV, ROWS
            )
        # fmt: on
    # fmt: off
    if together:
        _shared_part(
            heads, norm_weight, rotary, cache_k, cache_v, active, counters, table, members, partial, lse, scale_log2,
            head, chunk, chunks, begin, end, keys, values,
            HQ, HKV, G, D, DIM, ROTATED, EPS, NORM, BLOCK, MEMBERS, TILE, STAGES, PDL, PAIRS, EXACT,
            CAP_LOG2, TOGETHER, OFFSET, ONCE, LATER, BETA, ORIGINAL, ROWS, SHARED_MMA, scales, pairs, row_scales,
            ROW, FP8, WARPS,
        )
    else:
        _own_part(
            heads, norm_weight, rotary, cache_k, cache_v, counters, table, partial, lse, scale_log2,
            head, chunk, chunks, begin, end, keys, values, batch, slot, row, newest,
            HQ, HKV, G, D, DIM, ROTATED, EPS, NORM, BLOCK, TILE, STAGES, PDL, PAIRS, EXACT,
            CAP_LOG2, TOGETHER, OFFSET, ONCE, LATER, BETA, ORIGINAL, ROWS, OWN_MMA, scales, pairs, row_scales,
            ROW, FP8, WARPS,
        )
    # fmt: on
