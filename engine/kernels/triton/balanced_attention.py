"""Attention of a decode step of many sequences: every program reads equally many rows, whoever they belong to.

The plain twin is `engine/attention/sdpa.py`, the kernel for few sequences `attention.py`. The rows of all sequences are
one line, cut into as many equal shares as programs run at once, so that all begin and end together: "Stream-K:
Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU" (Osama et al. 2023) does that for
products. `share_kernel` cuts once a step, for all layers. A program copies without a break from the first row of its
share to the last, across the ends of sequences.

A group of D / 8 threads has a KV head of its own where there are enough, so that a program reads whole rows of the
cache, and leaves a part of its own for each sequence: nothing is exchanged between groups. A thread reads of shared
memory what it copied there itself.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,unreachable"
import triton
import triton.language as tl

from engine.kernels.triton.attention import attend_rows, line_of, norm_heads, scale_of_all
from engine.kernels.triton.gluon import async_copy, gl, jit
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import angles, capped, partners, rotate, weighed

SHARE = tl.constexpr(32)
"""Programs whose share one program of `share_kernel` looks up."""


@triton.jit(do_not_specialize=["rows", "programs"])
def share_kernel(
    active,
    counters,
    lines,
    shares,
    rows,
    programs,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Cut the rows of a step's sequences, in tiles of TILE rows, into a share for each of `programs` programs.

    active int32 [rows], counters int64 [slots, 2] as for `attention_kernel`; PADDED is the power of two from `rows` on.
    lines int32 [rows, 4]: of each sequence its slot, its row, where its tiles begin in the line of all tiles, how many
    it has (none without a slot); shares int32 [1 + programs, 4]: first how many tiles a share has and how many there
    are, then of each program its first sequence, its last one, and its first tile. A share has LEAST tiles at least.
    With a WINDOW a sequence begins with the tile of its oldest row. Programs [cdiv(programs, SHARE)].
    """
    number = tl.arange(0, PADDED)
    slot = tl.load(active + number, mask=number < rows, other=-1)
    row = tl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32)
    before = number * 0
    if WINDOW > 0:
        before = tl.maximum(row - (WINDOW - 1), 0) // TILE
    tiles = tl.where(slot >= 0, tl.maximum(tl.cdiv(row, TILE) - before, 1), 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    size = tl.maximum(tl.cdiv(total, programs), LEAST)
    place = tl.program_id(0)
    if place == 0:
        here = number < rows
        tl.store(lines + 4 * number, slot, mask=here)
        tl.store(lines + 4 * number + 1, row, mask=here)
        tl.store(lines + 4 * number + 2, ends - tiles, mask=here)
        tl.store(lines + 4 * number + 3, tiles, mask=here)
        tl.store(shares, size)
        tl.store(shares + 1, total)
    program = place * SHARE + tl.arange(0, SHARE)
    first = program * size
    last = tl.minimum(first + size, total) - 1
    # Whoever has no share looks at the last sequence, and finds nothing.
    first_of = tl.sum((ends[None, :] <= first[:, None]).to(tl.int32), 1)
    last_of = tl.sum((ends[None, :] <= last[:, None]).to(tl.int32), 1)
    there = program < programs
    at = shares + 4 * (program + 1)
    tl.store(at, first_of, mask=there)
    tl.store(at + 1, tl.where(first < total, last_of, first_of - 1), mask=there)
    tl.store(at + 2, first, mask=there)


@jit
def _copy_tile(
    keys, values, stage, cache_k, cache_v, table, head, tile, row, some, place,
    R: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, HKV: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Begin to copy K and V of a sequence's tile, R rows for each group, of rows before `row`; nothing unless `some`.

    Zeros stand for what is not copied. `place` [W, D]: where a number is, counted from the tile's first head.
    """
    first = tile * ROW * R
    oldest = row * 0
    if WINDOW > 0:
        oldest = gl.maximum(row - (WINDOW - 1), 0)
        first += oldest // (ROW * R) * (ROW * R)
    end = gl.where(some, row, 0)
    group = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0)
    block = gl.load(table + first // BLOCK, mask=first < end, other=0).to(tl.int64)
    start = ((block * BLOCK + first % BLOCK) * HKV + head) * DIM
    for i in tl.static_range(R):
        number = first + i * ROW + group // H
        seen = number < end
        if WINDOW > 0:
            seen = seen & (number >= oldest)
        seen = gl.expand_dims(seen, 1)
        if DIM < D:
            seen = seen & (columns < DIM)
        at = start + i * (ROW * HKV * DIM)
        async_copy.async_copy_global_to_shared(keys[i].index(stage), cache_k + at + place, mask=seen)
        async_copy.async_copy_global_to_shared(values[i].index(stage), cache_v + at + place, mask=seen)
    async_copy.commit_group()


@jit(do_not_specialize=["table_stride"])
def balanced_attention_kernel(
    heads,
    norm_weight,
    rotary,
    cache_k,
    cache_v,
    tables,
    counters,
    lines,
    shares,
    partial,
    lse,
    scale_log2,
    table_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PAIRS: tl.constexpr = False,
    EXACT: tl.constexpr = False,
    WINDOW: tl.constexpr = 0,
    CAP_LOG2: tl.constexpr = 0.0,
    TOGETHER: tl.constexpr = False,
    OFFSET: tl.constexpr = 0.0,
    ONCE: tl.constexpr = False,
):
    """Write K and V of each new token, and attend with its query heads to the rows of its sequence up to it.

    Arguments as for `attention_kernel`; lines and shares as `share_kernel` leaves them for tiles of R * W / H rows,
    where W = WARPS * 256 / D is how many groups of threads a program has. It takes H KV heads, which divide W and HKV.
    Programs [as many as there are shares, HKV / H]. The part of program p for sequence b has the number p + b: partial
    fp32 [programs + rows, W / H, HQ, DIM] and lse fp32 [programs + rows, W / H, HQ], which is -inf for a group without
    rows. `balanced_combine_kernel` puts them together.
    """
    gdc_launch_dependents(PDL)
    program = gl.program_id(0)
    head = gl.program_id(1) * H
    dtype: tl.constexpr = heads.dtype.element_ty
    GROUP: tl.constexpr = HQ // HKV
    LANES: tl.constexpr = D // 8
    W: tl.constexpr = WARPS * 32 // LANES
    ROW: tl.constexpr = W // H
    TILE: tl.constexpr = ROW * R
    ROWS: tl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    PLAIN: tl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    tl.static_assert(BLOCK % TILE == 0)
    size = gl.load(shares)
    total = gl.load(shares + 1)
    batch = gl.load(shares + 4 * program + 4)
    last = gl.load(shares + 4 * program + 5)
    at_tile = gl.load(shares + 4 * program + 6)
    left = tl.minimum(size, total - at_tile)
    if left <= 0:
        gdc_wait(PDL)
        return
    slot = gl.load(lines + 4 * batch)
    row = gl.load(lines + 4 * batch + 1)
    tile = at_tile - gl.load(lines + 4 * batch + 2)
    tiles = gl.load(lines + 4 * batch + 3)
    keys, values = (), ()
    for _ in tl.static_range(R):
        keys += (gl.allocate_shared_memory(cache_k.dtype.element_ty, [STAGES, W, D], PLAIN),)
        values += (gl.allocate_shared_memory(cache_v.dtype.element_ty, [STAGES, W, D], PLAIN),)
    group = gl.arange(0, W, layout=gl.SliceLayout(1, ROWS))
    own_head = gl.expand_dims(head + group % H, 1)
    columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ROWS)), 0) + gl.zeros(
        [W, 1], tl.int32, layout=ROWS
    )
    place = gl.expand_dims((group // H) * HKV + group % H, 1) * DIM + columns
    others = partners(columns, ROTATED, DIM, PAIRS)

    # Where the next tile to copy is: its sequence, its number there, how many that has, and how many are still to come.
    next_batch, next_tile, next_tiles, next_row, coming = batch, tile, tiles, row, left
    next_slot = slot
    for i in tl.static_range(STAGES):
        # fmt: off
        _copy_tile(
            keys, values, i, cache_k, cache_v, tables + next_slot.to(tl.int64) * table_stride, head,
            next_tile, next_row, coming > 0, place, R, ROW, W, H, D, DIM, BLOCK, HKV, WINDOW, ROWS,
        )
        # fmt: on
        coming -= 1
        next_tile += 1
        if (next_tile == next_tiles) & (coming > 0):
            next_batch += 1
            next_slot = gl.load(lines + 4 * next_batch)
            next_row = gl.load(lines + 4 * next_batch + 1)
            next_tiles = gl.load(lines + 4 * next_batch + 3)
            next_tile = 0
    gdc_wait(PDL)

    stage = 0
    for sequence in range(batch, last + 1):
        slot = gl.load(lines + 4 * sequence)
        row = gl.load(lines + 4 * sequence + 1)
        tiles = gl.load(lines + 4 * sequence + 3)
        count = tl.minimum(tiles - tile, left)
        newest = tile + count == tiles
        position = gl.load(counters + 2 * slot + 1)
        line = heads + sequence * (HQ + 2 * HKV) * DIM
        if ROTATED > 0:
            cosine, sine = angles(rotary + position * ROTATED, columns, ROTATED, DIM, PAIRS)
        new_v = line_of(line + (HQ + HKV + own_head) * DIM, columns, columns, D, DIM)
        placed = ()
        if TOGETHER:
            q_scale = scale_of_all(line, 0, HQ, D, DIM, EPS, W, ROWS)
            k_scale = scale_of_all(line, HQ, HKV, D, DIM, EPS, W, ROWS)
        for g in tl.static_range(GROUP + 1):
            at = (own_head * GROUP + g if g < GROUP else HQ + own_head) * DIM
            x = line_of(line + at, columns, columns, D, DIM).to(tl.float32)
            if ROTATED > 0:
                other = line_of(line + at, others, columns, D, DIM).to(tl.float32)
                if NORM:
                    weight = line_of(norm_weight + at, others, columns, D, DIM)
                    if TOGETHER:
                        other = weighed(other, q_scale if g < GROUP else k_scale, weight, OFFSET, ONCE)
                        other = other.to(tl.float32)
                    else:
                        other = norm_heads(other, x, weight, DIM, EPS, OFFSET, ONCE)
            if NORM:
                weight = line_of(norm_weight + at, columns, columns, D, DIM)
                if TOGETHER:
                    x = weighed(x, q_scale if g < GROUP else k_scale, weight, OFFSET, ONCE).to(tl.float32)
                else:
                    x = norm_heads(x, x, weight, DIM, EPS, OFFSET, ONCE)
            if ROTATED > 0:
                placed += (rotate(x, other, cosine, sine, dtype, EXACT),)
            else:
                placed += (x.to(dtype),)
        new_k = placed[GROUP]

        # The new row is the first that the groups of the last tile see.
        mine = newest & (group < H)
        q, high, weight_sum, sums = (), (), (), ()
        for g in tl.static_range(GROUP):
            x = placed[g].to(tl.float32)
            score = capped(gl.sum(x * new_k.to(tl.float32), 1) * scale_log2, CAP_LOG2)
            q += (x,)
            high += (gl.where(mine, score, float("-inf")),)
            weight_sum += (gl.where(mine, 1.0, 0.0),)
            sums += (gl.where(gl.expand_dims(mine, 1), new_v.to(tl.float32), 0.0),)
        if newest:
            block = gl.load(tables + slot.to(tl.int64) * table_stride + row // BLOCK).to(tl.int64)
            target = ((block * BLOCK + row % BLOCK) * HKV + own_head) * DIM + columns
            written = gl.expand_dims(group < H, 1)
            if DIM < D:
                written = written & (columns < DIM)
            gl.store(cache_k + target, new_k, mask=written)
            gl.store(cache_v + target, new_v, mask=written)

        begin = tile * TILE
        oldest = row * 0
        if WINDOW > 0:
            oldest = gl.maximum(row - (WINDOW - 1), 0)
            begin += oldest // TILE * TILE
        for step in range(count):
            async_copy.wait_group(STAGES - 1)
            start = begin + step * TILE
            # fmt: off
            high, weight_sum, sums = attend_rows(
                q, keys, values, stage, row - start, oldest - start if WINDOW > 0 else None, high, weight_sum, sums,
                scale_log2, CAP_LOG2, R, W, ROWS, H,
            )
            _copy_tile(
                keys, values, stage, cache_k, cache_v, tables + next_slot.to(tl.int64) * table_stride, head,
                next_tile, next_row, coming > 0, place, R, ROW, W, H, D, DIM, BLOCK, HKV, WINDOW, ROWS,
            )
            # fmt: on
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            coming -= 1
            next_tile += 1
            if (next_tile == next_tiles) & (coming > 0):
                next_batch += 1
                next_slot = gl.load(lines + 4 * next_batch)
                next_row = gl.load(lines + 4 * next_batch + 1)
                next_tiles = gl.load(lines + 4 * next_batch + 3)
                next_tile = 0

        part = ((program + sequence) * ROW + group // H) * HQ + (head + group % H) * GROUP
        for g in tl.static_range(GROUP):
            some = weight_sum[g] > 0.0
            result = sums[g] / gl.expand_dims(gl.where(some, weight_sum[g], 1.0), 1)
            logs = gl.where(some, high[g] + gl.log2(weight_sum[g]), float("-inf"))
            gl.store(lse + part + g, logs)
            at = gl.expand_dims(part + g, 1) * DIM + columns
            if DIM == D:
                gl.store(partial + at, result)
            else:
                gl.store(partial + at, result, mask=columns < DIM)
        left -= count
        tile = 0
    async_copy.wait_group(0)


@triton.jit
def balanced_combine_kernel(
    partial,
    lse,
    lines,
    shares,
    out,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
    sinks=None,
):
    """out [rows, HQ, DIM] from the parts of `balanced_attention_kernel`, PARTS of them at a time; ROW is its W / H.

    Programs [HQ, rows]. sinks [HQ] as for `combine_kernel`.
    """
    gdc_launch_dependents(PDL)
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    columns = tl.arange(0, D)
    size = tl.load(shares)
    begin = tl.load(lines + 4 * sequence + 2)
    tiles = tl.load(lines + 4 * sequence + 3)
    if tiles == 0:
        gdc_wait(PDL)
        return
    first = begin // size
    count = ((begin + tiles - 1) // size - first + 1) * ROW
    top = -float("inf")
    total = 0.0
    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    mixed = tl.zeros([D], tl.float32)
    gdc_wait(PDL)
    for start in range(0, count, PARTS):
        number = start + tl.arange(0, PARTS)
        there = number < count
        part = ((first + sequence) * ROW + number).to(tl.int64) * HQ + head
        logs = tl.load(lse + part, mask=there, other=-float("inf"))
        inside = there[:, None]
        if DIM < D:
            inside = inside & (columns < DIM)[None, :]
        values = tl.load(partial + part[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
        highest = tl.maximum(top, tl.max(logs, 0))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        shares_of = tl.exp2(logs - base)
        shrink = tl.exp2(top - base)
        mixed = mixed * shrink + tl.sum(values * shares_of[:, None], 0)
        total = total * shrink + tl.sum(shares_of, 0)
        top = highest
    at = out + (sequence * HQ + head) * DIM + columns
    mixed /= total
    if DIM == D:
        tl.store(at, mixed.to(out.dtype.element_ty))
    else:
        tl.store(at, mixed.to(out.dtype.element_ty), mask=columns < DIM)
