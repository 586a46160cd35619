"""`linear_kernel` for weights in planes: products of a decode step of one to 16 rows with quantised weights.

The plain twin is `models/reference/tiled.py`, with the fused operations as in `linear.py`. The difference is how
weights reach the tensor cores: a warp copies two tiles of 8 rows and 128 columns at a time, and expands their codes to
numbers in registers (`packed.py`). All else is as in `linear_kernel`: weights and scales are copied before the wait,
warps divide the columns, and the order of sums depends only on the tile. With LANES, a row takes several columns of a
tensor core's sums (`lanes.py`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,index,misc"
import triton.language as tl

from engine.kernels.triton.columns import along
from engine.kernels.triton.fused_combine import left_parts
from engine.kernels.triton.fused_norm import (
    apply_weight,
    gather_sums,
    leave_sums,
    prepare,
)
from engine.kernels.triton.gluon import (
    async_copy,
    constexpr_function,
    gl,
    input_layout,
    jit,
    mma_v2,
    type_layout,
    unpaired,
)
from engine.kernels.triton.lanes import lane_columns, load_lanes, own, together
from engine.kernels.triton.launch import gdc_wait
from engine.kernels.triton.linear import begin, finish, head_number, wait_for_input
from engine.kernels.triton.packed import (
    COLUMNS,
    copy_codes,
    copy_rows,
    load_rows,
    load_words,
    matrix_choice,
    operand,
    pick,
)
from engine.kernels.triton.packed_inputs import load_inputs, load_norm

UNROLLED = tl.constexpr(4)
"""The most spans that are multiplied without a loop."""
TURNING = 2
"""Programs of up to this many tiles multiply several spans per turn of the loop: the later ones find their inputs in
the registers that the first has loaded, and know their place in shared memory. With more tiles, the registers needed
would keep other programs off the multiprocessor."""


@constexpr_function
def _each(turns, tiles, stages, alone):
    """Return the number of spans per turn of the loop: one if they are to be multiplied `alone`."""
    if tiles > TURNING or alone:
        return 1
    if stages == 3 and turns % 3 == 0:
        return 3
    return 2 if turns % 2 == 0 else 1


@jit
def _place(i, STAGES: tl.constexpr):
    """Return the place of span i in shared memory."""
    return i - i // STAGES * STAGES


@jit
def _copy_span(
    held, planes, first, i, place, experts, CODES: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr,
    ACROSS: tl.constexpr, CHOSEN: tl.constexpr, PAIR: tl.constexpr, UP: tl.constexpr, LAST: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Start copying the tiles of span i to `place` in shared memory, with zeros outside the weights."""
    codes, more, scales, supers = planes
    for j in tl.static_range(TILES):
        held_codes, held_more, held_scales, held_supers = held[j]
        # fmt: off
        copy_codes(
            held_codes.index(place), codes, first, j * (2 // PAIR), i, experts,
            CODES.bits, WARPS, ACROSS, CHOSEN, UP, LAST, MASKED,
        )
        if CODES.more > 0:
            copy_codes(
                held_more.index(place), more, first, j * (2 // PAIR), i, experts,
                CODES.more, WARPS, ACROSS, CHOSEN, UP, LAST, MASKED,
            )
        copy_rows(
            held_scales.index(place), scales, first, j * (2 // PAIR), i, experts,
            CODES.values, 1, WARPS, ACROSS, CHOSEN, UP, LAST, MASKED,
        )
        if CODES.supers:
            copy_rows(
                held_supers.index(place), supers, first, j * (2 // PAIR), i, experts,
                2, 2, WARPS, ACROSS, CHOSEN, UP, LAST, MASKED,
            )
        # fmt: on


@jit
def _squares(part, WARPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Add up the squares of [WARPS, GROUP, ROWS] that a thread has: fp32 [WARPS, 4, ROWS]."""
    part = gl.reshape(part.to(tl.float32), [WARPS, 4, GROUP // 4, ROWS])
    return gl.sum(part * part, 2)


@jit
def _span(
    i, after, place, held, planes, first, experts, weighed, rows, given, attended, norm_weight, order,
    sums, squares, parts, scales, constant, K: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    CODES: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    ACROSS: tl.constexpr, CHOSEN: tl.constexpr, TURNS: tl.constexpr, PAIR: tl.constexpr, UP: tl.constexpr,
    LAST: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    APART: tl.constexpr, RUN: tl.constexpr, MMA: tl.constexpr, W: tl.constexpr, X: tl.constexpr,
    ATTENDED: tl.constexpr,
):  # fmt: skip
    """Multiply span i, at `place` in shared memory; meanwhile load the rows of span `after` and copy later weights.

    A part of a span is RUN groups. Sums of a tile, and of squares, are APART for as many parts in turn.
    """
    GROUP: tl.constexpr = CODES.group
    CHUNKS: tl.constexpr = COLUMNS // GROUP
    PARTS: tl.constexpr = CHUNKS // RUN
    OPERAND: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=GROUP // 4)
    SCALES: tl.constexpr = CHUNKS // CODES.shared
    MINIMA: tl.constexpr = CODES.values > SCALES or planes[2].dtype.element_ty == tl.uint8
    # Whether codes give the numbers themselves, not 128 too large.
    EXACT: tl.constexpr = CODES.bits == 8 or CODES.floats > 0
    coming, coming_scales = load_inputs(
        after, rows, given, attended, norm_weight, order, K, NORM, WARPS, GROUP, ACROSS, CHOSEN, WHOLE, RUN, X,
        ATTENDED,
    )  # fmt: skip
    normed, common, added, squared = (), (), (), squares
    nothing = gl.zeros([WARPS, 16, ROWS], tl.float32, layout=MMA)
    for number in tl.static_range(PARTS):
        part = unpaired(parts[number], X)
        if NORM:
            if LANES == 1:
                squared = (squared[0] + part.to(tl.float32) * part.to(tl.float32),)
            else:
                squared = squared[1:] + (squared[0] + _squares(part, WARPS, GROUP, ROWS),)  # noqa: RUF005
            part = apply_weight(part, unpaired(scales[number], X), OFFSET)
        part = gl.convert_layout(part, OPERAND)
        normed += (part,)
        if EXACT and not MINIMA:
            common += (nothing,)
        else:
            common += (mma_v2(constant, part, nothing),)
    async_copy.wait_group(STAGES - 1)
    for j in tl.static_range(TILES):
        held_codes, held_more, held_scales, held_supers = held[j]
        if RUN > 1:
            values = load_lanes(held_scales.index(place), WARPS, CODES.values, RUN, MMA)
        else:
            values = load_rows(held_scales.index(place), WARPS, CODES.values, MMA)
        high, low = 1.0, -0.0078125
        if CODES.supers:
            high, low = load_rows(held_supers.index(place), WARPS, 2, MMA)
            low *= 0.0078125
        if weighed is not None:
            share = pick(weighed, matrix_choice(i, MMA, WARPS, ACROSS), CHOSEN)
            high, low = high * share, low * share
        words = load_words(held_codes.index(place), WARPS, CODES.bits)
        others = words
        if CODES.more > 0:
            others = load_words(held_more.index(place), WARPS, CODES.more)
        totals = ()
        for k in tl.static_range(APART):
            totals += (sums[j * APART + k],)
        for number in tl.static_range(PARTS):
            products, start = (), nothing if EXACT else common[number]
            for k in tl.static_range(RUN):
                tile = operand(words, others, number * RUN + k, WARPS, CODES, W)
                products += (mma_v2(tile, normed[number], start),)
            product = products[0] if RUN == 1 else own(products, MMA)
            total = totals[0] + product * (values[number // CODES.shared] * high)
            if MINIMA:  # times the sum of x over the group; `common` is -128 times that sum
                total += common[number] * (values[SCALES // RUN + number // CODES.shared] * low)
            # Each comes to its place again, because the number of parts is a multiple of APART.
            totals = totals[1:] + (total,)  # noqa: RUF005 - the compiler knows no other way
        added += totals
    if STAGES < TURNS:  # noqa: SIM102 - this is known when the kernel is compiled
        if i + STAGES < TURNS:
            _copy_span(
                held, planes, first, i + STAGES, place, experts, CODES, WARPS, TILES,
                ACROSS, CHOSEN, PAIR, UP, LAST, MASKED,
            )  # fmt: skip
    async_copy.commit_group()  # even an empty group, because the wait counts groups
    return added, squared, coming, coming_scales


@jit
def _added(sums, GATED: tl.constexpr, ROWS: tl.constexpr):
    """Add up sums [warps, 16, ROWS] over warps: [16, ROWS], or [8, ROWS, 2] of pairs."""
    y = gl.sum(sums, 0)
    if GATED:
        y = gl.permute(gl.reshape(y, [2, 8, ROWS]), [1, 2, 0])
    return y


@jit
def packed_linear_kernel(
    x,
    codes,
    more,
    scales,
    supers,
    bias,
    norm_weight,
    residual,
    out,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    CODES: tl.constexpr,
    PDL: tl.constexpr,
    OFFSET: tl.constexpr = 0.0,
    GATE: tl.constexpr = None,
    SCALE: tl.constexpr = 1.0,
    CAP: tl.constexpr = 0.0,
    experts=None,
    shares=None,
    CHOSEN: tl.constexpr = 1,
    order=None,
    prepared=None,
    square_sums=None,
    PREPARED: tl.constexpr = 0,
    PREPARES: tl.constexpr = 0,
    LANES: tl.constexpr = 1,
    partial=None,
    lse=None,
    active=None,
    counters=None,
    ATTENDED: tl.constexpr = None,
    LEADS: tl.constexpr = False,
    FOLLOWS: tl.constexpr = False,
    BESIDE: tl.constexpr = 0,
    row_gates=None,
    HEADS: tl.constexpr = None,
):
    """Write out [COUNT, N] = x [COUNT, K] @ weight [N, K] transposed: `linear_kernel` with a weight in planes.

    Rows of `out` and of the residual are STRIDE apart. With GATED, the planes are those of gate, in whole tiles,
    followed by those of up. CODES describes the planes (see `Codes`). A program computes 16 * TILES outputs, half as
    many with GATED. LANES is 1, or 4 if each group has a scale. ATTENDED (for a row in lanes), BESIDE, LEADS, FOLLOWS,
    row_gates and HEADS are as in `linear_kernel`. Pointers that the flags leave unused may be anything. order, int32
    [K], is the column of x for each column of the planes; None: the same.

    With experts, the indices of CHOSEN matrices whose planes lie one after the other, and shares fp32 [CHOSEN], x is
    [1, CHOSEN, K]. The result is the sum of the experts' products times their shares, computed as the product of one
    matrix. bias is then [matrices, N].
    """
    begin(PDL, LEADS, FOLLOWS)
    dtype: tl.constexpr = x.dtype.element_ty
    GROUP: tl.constexpr = CODES.group
    MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    W: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=GROUP // 4)
    SUMS: tl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 8, 4], [1, 1, WARPS], [1, 2, 0])
    HELD: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ROWS: tl.constexpr = 8 if COUNT <= 8 else 16
    RUN: tl.constexpr = lane_columns(COUNT, LANES)
    APART: tl.constexpr = LANES // RUN
    FOUND: tl.constexpr = 1 if RUN == 4 and COUNT == 1 else ROWS // RUN
    X: tl.constexpr = input_layout(WARPS, GROUP, ROWS)
    SQUARES: tl.constexpr = NORM and PREPARED == 0
    PAIR: tl.constexpr = 2 if GATED else 1
    OUTPUTS: tl.constexpr = 16 // PAIR
    LAST: tl.constexpr = (N + 7) // 8
    UP: tl.constexpr = LAST if GATED else 1
    ACROSS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    SPANS: tl.constexpr = ACROSS * CHOSEN
    TURNS: tl.constexpr = (SPANS + WARPS - 1) // WARPS
    WHOLE: tl.constexpr = TURNS * WARPS * COLUMNS == K * CHOSEN
    MASKED: tl.constexpr = TURNS * WARPS != SPANS or LAST % (TILES * 2 // PAIR) != 0
    STAGES: tl.constexpr = AHEAD if AHEAD < TURNS else TURNS
    # With four sums, two spans of these kinds would take too many registers.
    ALONE: tl.constexpr = APART > 2 and (CODES.supers or CODES.bits == 8)
    EACH: tl.constexpr = _each(TURNS, TILES, STAGES, ALONE)

    tile = gl.program_id(0) * (TILES * 2 // PAIR)
    first = gl.program_id(0) * (TILES * OUTPUTS)
    held = ()  # by tile: between copies to the same memory, all warps would wait for each other
    for _ in tl.static_range(TILES):
        held_codes = gl.allocate_shared_memory(tl.int32, [STAGES, WARPS, 2, 32 * CODES.bits], HELD)
        held_scales = gl.allocate_shared_memory(
            scales.dtype.element_ty, [STAGES, WARPS, 16, CODES.values], HELD
        )
        held_more, held_supers = held_codes, held_scales
        if CODES.more > 0:
            held_more = gl.allocate_shared_memory(tl.int32, [STAGES, WARPS, 2, 32 * CODES.more], HELD)
        if CODES.supers:
            held_supers = gl.allocate_shared_memory(tl.float16, [STAGES, WARPS, 16, 2], HELD)
        held += ((held_codes, held_more, held_scales, held_supers),)
    planes = codes, more, scales, supers
    # fmt: off
    for i in tl.static_range(STAGES):
        _copy_span(
            held, planes, tile, i, i, experts,
            CODES, WARPS, TILES, ACROSS, CHOSEN, PAIR, UP, LAST, MASKED,
        )
        async_copy.commit_group()
    norm_scales = ()
    if SQUARES:
        for part in tl.static_range(COLUMNS // GROUP // RUN):
            norm_scales += (load_norm(norm_weight, 0, part, order, K, WARPS, GROUP, WHOLE, RUN, X),)
    like = _added(gl.zeros([WARPS, 16, FOUND], tl.float32, layout=SUMS), GATED, FOUND)
    if GATED:
        like, _ = gl.split(like)
    DONE: tl.constexpr = type_layout(like.type)
    n = first + gl.expand_dims(gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, DONE)), 1)
    b = gl.expand_dims(gl.arange(0, FOUND, layout=gl.SliceLayout(0, DONE)), 0)
    after = ()
    if PREPARES:
        for j in tl.static_range(TILES):
            after += (gl.load(norm_weight + n + j * OUTPUTS, mask=n + j * OUTPUTS < N, other=0.0),)
    constant = gl.full([WARPS, 16, GROUP], -128.0 - CODES.less, dtype, layout=W)
    attended = None
    if ATTENDED is not None:
        attended = left_parts(partial, lse, active, counters, head_number(first, HEADS), ATTENDED)
    # Everything loaded so far is weights; earlier kernels of the step wrote what is loaded next.
    wait_for_input(PDL, LEADS, FOLLOWS)
    weighed = None
    if shares is not None:
        weighed = ()
        for j in tl.static_range(CHOSEN):
            weighed += (gl.load(shares + j),)
    carried = ()
    if RESIDUAL:
        for j in tl.static_range(TILES):
            there = (n + j * OUTPUTS < N) & (b < COUNT)
            at = residual + b * (BESIDE if BESIDE else STRIDE) + n + j * OUTPUTS
            carried += (gl.load(at, mask=there, other=0.0).to(tl.float32),)
    rows, given = x, None
    if HEADS is not None:
        rows += head_number(first, HEADS) * HEADS.apart
    if FOUND > 1:
        rows += along(2, ROWS, X) // RUN * (K if HEADS is None else HEADS.row)
    if FOUND > COUNT:
        given = along(2, ROWS, X) // RUN < COUNT
    squares, sums = (), ()
    nothing = gl.zeros([WARPS, GROUP, ROWS], tl.float32, layout=X)
    for _ in tl.static_range(APART):
        squares += (nothing if LANES == 1 else _squares(nothing, WARPS, GROUP, ROWS),)
    for _ in tl.static_range(TILES * APART):
        sums += (gl.zeros([WARPS, 16, ROWS], tl.float32, layout=MMA),)
    parts, _ = load_inputs(
        0, rows, given, attended, norm_weight, order, K, False, WARPS, GROUP, ACROSS, CHOSEN, WHOLE, RUN, X,
        ATTENDED,
    )
    if NORM and PREPARED > 0:
        total = gather_sums(square_sums, PREPARED, COUNT, WARPS, FOUND)
    # Unrolled spans of K-quants with separate sums would take 192 registers.
    if UNROLLED - (CODES.supers and APART > 1) >= TURNS:
        for i in tl.static_range(TURNS):
            sums, squares, parts, norm_scales = _span(
                i, i + 1 - (i + 1) // TURNS, _place(i, STAGES), held, planes, tile, experts, weighed, rows, given,
                attended, norm_weight, order, sums, squares, parts, norm_scales, constant, K, SQUARES, OFFSET, CODES,
                WARPS, TILES, STAGES, ACROSS, CHOSEN, TURNS, PAIR, UP,
                LAST, MASKED, WHOLE, ROWS, LANES, APART, RUN, MMA, W, X, ATTENDED,
            )
    else:
        for turn in range(TURNS // EACH):
            for k in tl.static_range(EACH):
                sums, squares, parts, norm_scales = _span(
                    # The last span loads its own inputs again, which are not used.
                    turn * EACH + k, turn * EACH + k + (1 if k + 1 < EACH else turn + 1 < TURNS // EACH),
                    _place(k if EACH // STAGES * STAGES == EACH else turn * EACH + k, STAGES),
                    held, planes, tile, experts, weighed, rows, given, attended, norm_weight, order,
                    sums, squares, parts, norm_scales, constant, K, SQUARES, OFFSET, CODES,
                    WARPS, TILES, STAGES, ACROSS, CHOSEN, TURNS, PAIR, UP, LAST, MASKED, WHOLE, ROWS, LANES, APART, RUN,
                    MMA, W, X, ATTENDED,
                )
    scale = None
    if SQUARES:
        total = gl.sum(together(squares, WARPS, 4, RUN, FOUND), 1)
    if NORM:
        total = gl.sum(gl.convert_layout(total, gl.SliceLayout(1, SUMS)), 0)
        scale = gl.convert_layout(gl.rsqrt(total / K + EPS), gl.SliceLayout(0, DONE))
    left = gl.zeros([OUTPUTS, FOUND], tl.float32, layout=DONE)
    for j in tl.static_range(TILES):
        y = together(sums[j * APART : (j + 1) * APART], WARPS, 16, RUN, FOUND)
        y = _added(gl.convert_layout(y, SUMS), GATED, FOUND)
        up, at = y, n + j * OUTPUTS
        if GATED:
            y, up = gl.split(y)
        if BIAS and experts is not None:
            for k in tl.static_range(CHOSEN):
                own = gl.load(bias + experts[k].to(tl.int64) * N + at, mask=at < N, other=0.0)
                y += weighed[k] * own.to(tl.float32)
        y = finish(
            y, up, at, b, scale, carried[j] if RESIDUAL else None, bias, out,
            N, STRIDE, COUNT, NORM, BIAS and experts is None, GATED, RESIDUAL, GATE, SCALE, CAP, BESIDE, row_gates,
        )
        if PREPARES:
            left += prepare(y, after[j], at, b, prepared, N, STRIDE, COUNT, OFFSET)
    if PREPARES:
        leave_sums(left, square_sums, PREPARES, COUNT)
    # fmt: on
    if FOLLOWS:
        gdc_wait(PDL)
