"""Attention of a decode step to latents, on tensor cores (see `models.spec.LatentAttention`). `combine.py` combines it.

The plain twin is `models/reference/latent.py`. All query heads attend to the same rows, each a latent and a rotated
key, with queries that are multiplied by k_b already ("absorbed", DeepSeek-V2 2024); the values are the latents
themselves. A program has up to LANES heads and a part of a sequence's rows. It copies the first of them into shared
memory before it waits for the previous kernel, in pieces of as many columns as the key has.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,unreachable,var-annotated"
import triton.language as tl

from engine.kernels.triton.attention_bytes import addresses
from engine.kernels.triton.gluon import async_copy, gl, jit, mma_v2
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import angles, partners, rotate, weighed

LANES = tl.constexpr(16)
"""Query heads of a program: the rows of a tensor core's tile."""


@jit
def _copy(
    held, stage, cache, table, start, end, TILE: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Start copying TILE rows from row `start` of a block table; zeros from row `end` on."""
    columns = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS)), 0)
    local = gl.arange(0, TILE, layout=gl.SliceLayout(1, ROWS))
    rows, _, at = addresses((cache, cache), table, start, end, local, BLOCK, TILE, PIECES * WIDTH)
    at = gl.expand_dims(at, 1) + columns
    there = gl.expand_dims(local < end - start, 1) & (columns < WIDTH)
    for piece in tl.static_range(PIECES):
        place = held[piece].index(stage)
        async_copy.async_copy_global_to_shared(place, rows + piece * WIDTH + at, mask=there)
    async_copy.commit_group()


@jit
def _attend(
    queries, m, l, sums, held, cache, table, begin, end, scale_log2,  # noqa: E741 - as in the paper
    STAGES: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over rows `begin` to `end`, whose first STAGES tiles are being copied.

    See `attend_tile` of `paged_attention.py`. `queries` has PIECES of [LANES, WIDTH]. m and l are [LANES], `sums` are
    the pieces of latents, [LANES, WIDTH], in the layout MMA.
    """
    dtype: tl.constexpr = cache.dtype.element_ty
    Q: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    K: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    column = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, MMA)), 0)
    nothing = gl.zeros([LANES, TILE], tl.float32, layout=MMA)
    # Sums of weights stay separate by column until the end: that saves a reduction over all warps per tile.
    spread = gl.where(column == 0, gl.expand_dims(l, 1), nothing)
    stage = 0
    for start in range(begin, end, TILE):
        async_copy.wait_group(STAGES - 1)
        scores, others = nothing, nothing  # two sums, so that a product need not wait for the one before it
        for piece in tl.static_range(PIECES):
            key = held[piece].index(stage).permute((1, 0)).load(K)
            scores, others = others, mma_v2(queries[piece].load(Q), key, scores)
        scores = (scores + others) * scale_log2
        scores = gl.where(column < end - start, scores, float("-inf"))
        highest = gl.maximum(m, gl.max(scores, 1))
        base = gl.where(highest == float("-inf"), 0.0, highest)
        weights = gl.exp2(scores - gl.expand_dims(base, 1))
        shrink = gl.exp2(m - base)
        m = highest
        spread = spread * gl.expand_dims(shrink, 1) + weights
        weights = gl.convert_layout(weights.to(dtype), Q)
        added = ()
        for piece in tl.static_range(PIECES - 1):
            value = held[piece].index(stage).load(K)
            added += (mma_v2(weights, value, sums[piece] * gl.expand_dims(shrink, 1)),)
        sums = added
        _copy(held, stage, cache, table, start + STAGES * TILE, end, TILE, WIDTH, PIECES, BLOCK, ROWS)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    return m, gl.sum(spread, 1), sums


@jit
def _queries(
    absorbed, q, cosine, sine, batch, line, there, columns, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Load the queries of the heads `line`, zeros where not `there`: PIECES of [LANES, WIDTH]."""
    inside = there & (columns < WIDTH)
    found = ()
    for piece in tl.static_range(PIECES - 1):
        at = (batch * HEADS + line) * ((PIECES - 1) * WIDTH) + piece * WIDTH
        found += (gl.load(absorbed + at + columns, mask=inside, other=0.0),)
    last = q + (batch * HEADS + line) * DIM + (DIM - WIDTH)
    x = gl.load(last + columns, mask=inside, other=0.0)
    if ROTATED:
        other = gl.load(last + partners(columns, WIDTH, WIDTH, PAIRS), mask=inside, other=0.0)
        x = rotate(x.to(tl.float32), other.to(tl.float32), cosine, sine, absorbed.dtype.element_ty, EXACT)
    return found + (x,)  # noqa: RUF005 - the compiler knows no other way


# A different longest context must not recompile the kernel.
@jit(do_not_specialize=["table_stride"])
def latent_kernel(
    absorbed,
    q,
    given,
    norm_weight,
    rotary,
    cache,
    active,
    tables,
    counters,
    partial,
    lse,
    scale_log2,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ONCE: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write what is kept of each new token, and attend to it and to the rows of its sequence before it.

    absorbed [rows, HEADS, (PIECES - 1) * WIDTH] are the first parts of queries, times k_b; the last WIDTH numbers of q
    [rows, HEADS, DIM] are the others, not yet rotated. given [rows, PIECES * WIDTH] is a row before its norm
    (norm_weight, EPS, OFFSET and ONCE as in `attention_kernel`) and its rotation (rotary [positions, WIDTH], if
    ROTATED; PAIRS and EXACT as in `attention_kernel`). cache [slots, PIECES * WIDTH] keeps rows.

    active, tables and counters are as for `attention_kernel`; the chunks of a sequence and their result, in partial
    fp32 [rows, CHUNKS, HEADS, (PIECES - 1) * WIDTH] and lse, as for `combine_kernel`. The grid is [cdiv(HEADS, GROUP),
    chunks in use, rows]; GROUP is LANES at most. TILE rows are read at once, STAGES tiles are in flight.
    """
    gdc_launch_dependents(PDL)
    group, part, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    dtype: tl.constexpr = cache.dtype.element_ty
    ACROSS: tl.constexpr = WIDTH // 8
    ROWS: tl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    HELD: tl.constexpr = gl.SwizzledSharedLayout(8, 1, ACROSS, [1, 0])
    RANK: tl.constexpr = (PIECES - 1) * WIDTH
    slot = gl.load(active + batch)
    row = gl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32)
    size = CHUNK
    for _ in tl.static_range(DOUBLINGS):
        size = gl.where(row >= size * CHUNKS, 2 * size, size)
    begin = part * size
    if (slot < 0) | (begin > row):
        gdc_wait(PDL)
        return
    end = gl.minimum(begin + size, row)
    newest = begin + size > row
    table = tables + slot.to(tl.int64) * table_stride
    held, queries = (), ()  # by piece: between copies to the same memory, all warps would wait for each other
    for _ in tl.static_range(PIECES):
        held += (gl.allocate_shared_memory(dtype, [STAGES, TILE, WIDTH], HELD),)
        queries += (gl.allocate_shared_memory(dtype, [LANES, WIDTH], HELD),)
    for i in tl.static_range(STAGES):
        _copy(held, i, cache, table, begin + i * TILE, end, TILE, WIDTH, PIECES, BLOCK, ROWS)
    lane = gl.expand_dims(gl.arange(0, LANES, layout=gl.SliceLayout(1, ROWS)), 1)
    columns = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS)), 0)
    line = group * GROUP + lane
    position = gl.load(counters + 2 * slot + 1)
    place = gl.load(table + row // BLOCK).to(tl.int64) * BLOCK + row % BLOCK
    own_columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MMA))  # those of the sums that a thread has
    norms, own_norms = (), ()
    for piece in tl.static_range(PIECES - 1):
        norms += (gl.load(norm_weight + piece * WIDTH + columns),)
        own_norms += (gl.load(norm_weight + piece * WIDTH + own_columns),)
    cosine, sine = columns, columns
    if ROTATED:
        cosine, sine = angles(rotary + position * WIDTH, columns, WIDTH, WIDTH, PAIRS)
    gdc_wait(PDL)
    # Everything is requested before anything is used: a warp waits for what it uses first.
    given += batch * (PIECES * WIDTH)
    latent, values = (), ()
    for piece in tl.static_range(PIECES):
        latent += (gl.load(given + piece * WIDTH + columns),)
    for piece in tl.static_range(PIECES - 1):
        values += (gl.load(given + piece * WIDTH + own_columns),)
    other = latent[PIECES - 1]
    if ROTATED:
        other = gl.load(given + RANK + partners(columns, WIDTH, WIDTH, PAIRS))
    # fmt: off
    found = _queries(
        absorbed, q, cosine, sine, batch, line, (lane < GROUP) & (line < HEADS), columns,
        HEADS, DIM, WIDTH, PIECES, ROTATED, PAIRS, EXACT,
    )
    # fmt: on
    for piece in tl.static_range(PIECES):
        queries[piece].store(found[piece])
    squares = (columns * 0).to(tl.float32)
    for piece in tl.static_range(PIECES - 1):
        squares += latent[piece].to(tl.float32) * latent[piece].to(tl.float32)
    factor = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / RANK + EPS)
    dots, sums = (lane * 0 + columns * 0).to(tl.float32), ()
    for piece in tl.static_range(PIECES):
        x = latent[piece]
        if piece < PIECES - 1:
            x = weighed(x.to(tl.float32), factor, norms[piece], OFFSET, ONCE)
            value = weighed(values[piece].to(tl.float32), factor, own_norms[piece], OFFSET, ONCE).to(
                tl.float32
            )
            nothing = gl.zeros([LANES, WIDTH], tl.float32, layout=MMA)
            sums += (nothing + gl.where(newest, gl.expand_dims(value, 0), 0.0),)
        elif ROTATED:
            x = rotate(x.to(tl.float32), other.to(tl.float32), cosine, sine, dtype, EXACT)
        dots += found[piece].to(tl.float32) * x.to(tl.float32)
        is_kept = newest & (group == 0) & (columns < WIDTH)
        gl.store(cache + place * (PIECES * WIDTH) + piece * WIDTH + columns, x.to(dtype), mask=is_kept)
    score = gl.convert_layout(gl.sum(dots, 1) * scale_log2, gl.SliceLayout(1, MMA))
    m, l = gl.where(newest, score, float("-inf")), gl.where(newest, score * 0.0 + 1.0, 0.0)  # noqa: E741
    # fmt: off
    m, l, sums = _attend(  # noqa: E741
        queries, m, l, sums, held, cache, table, begin, end, scale_log2,
        STAGES, TILE, WIDTH, PIECES, BLOCK, ROWS, MMA,
    )
    # fmt: on
    line = gl.arange(0, LANES, layout=gl.SliceLayout(1, MMA))
    there = (line < GROUP) & (group * GROUP + line < HEADS)
    at = (batch * CHUNKS + part) * HEADS + group * GROUP + line
    gl.store(lse + at, m + gl.log2(l), mask=there)
    columns = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MMA)), 0)
    at, inside = gl.expand_dims(at, 1) * RANK, gl.expand_dims(there, 1) & (columns < WIDTH)
    for piece in tl.static_range(PIECES - 1):
        mixed = sums[piece] / gl.expand_dims(l, 1)
        gl.store(partial + at + (piece * WIDTH + columns), mixed, mask=inside)
