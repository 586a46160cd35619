"""Products of a decode step of one to 16 rows, fused with the operations before and after them.

The plain twins are in `models/reference/decoder.py`: Linear with the RMSNorm before it, with the residual sum after it,
or the gated half of an MLP. For a norm, x times the norm's weight is rounded, and 1 / RMS multiplies the sums.
Operations after the sums (bias, activation, residual) are done in fp32 and rounded once. Both are more accurate than
rounding after each operation. The product that writes x may also multiply it by the weight of the norm that follows and
sum its squares: see `prepare`.

A program computes a few outputs for all rows. It starts to copy their weights into shared memory before it waits for
the previous kernel (programmatic dependent launch), so memory is read without a break from the first kernel of a step
to the last. (In registers, the weights would leave no room for programs of the next kernels.) Its warps divide the
columns; each multiplies its own on tensor cores, where up to eight rows cost the same and up to 16 little more, and the
result of a row does not depend on the other rows. The order of the sums over the columns depends only on the tile.

The kernels are written in Gluon, Triton's language with layouts: a thread copies eight neighbouring weights, 16 bytes,
and reads the same ones again, into the registers from which the tensor core takes them. (This permutes the columns
within a warp, of weights and rows alike.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
from typing import NamedTuple

import triton.language as tl

from engine.kernels.triton.columns import SPAN, along, load, tile_columns
from engine.kernels.triton.fused_combine import combined, left_parts
from engine.kernels.triton.fused_norm import (
    apply_weight,
    gather_sums,
    leave_sums,
    prepare,
)
from engine.kernels.triton.gluon import async_copy, fence, gl, jit, mma_v2, own_layout, type_layout
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import activate, capped, gated

UNROLLED = tl.constexpr(6)
"""The most tiles of x that are multiplied without a loop."""


class HeadInputs(NamedTuple):
    """Where in x the inputs of each head of a product lie."""

    outputs: int
    """How many outputs each head has, a multiple of 16."""
    apart: int
    """How far apart the inputs of two heads are."""
    row: int
    """How far apart two rows are."""


@jit
def _copy_weights(
    held,
    weights,
    column,
    output,
    i,
    N: tl.constexpr,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Start copying the tiles of span i, with zeros outside the weights."""
    stage = i - i // STAGES * STAGES
    for j in tl.static_range(TILES):
        place = held[j].index(stage)
        at, there = weights + j * OUTPUTS * K + (i * STEP + column), i * STEP + column < K
        if N % (TILES * OUTPUTS) != 0:
            there = there & (output + j * OUTPUTS < N)
        if WHOLE and N % (TILES * OUTPUTS) == 0:
            async_copy.async_copy_global_to_shared(place, at)
        else:
            async_copy.async_copy_global_to_shared(place, at, mask=there)


@jit
def _input(
    rows, given, attended, step, fold, K: tl.constexpr, WARPS: tl.constexpr, FOLDS: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, X: tl.constexpr, ATTENDED: tl.constexpr,
):  # fmt: skip
    """Load the rows of a fold, `step` columns further on, or combine them if they are `attended`."""
    if ATTENDED is None:
        loaded = load(rows, step + tile_columns(fold, 1, X, WARPS, FOLDS), given, K, WHOLE)
    else:
        L: tl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
        first = step + tile_columns(fold, 1, L, WARPS, FOLDS, 4)
        found = combined(attended, first, along(2, 4, L), K, ATTENDED).to(rows.dtype.element_ty)
        found = gl.convert_layout(gl.reshape(found, [WARPS, SPAN]), gl.SliceLayout(2, X))
        # Of the columns of other rows, nothing is stored.
        loaded, _ = gl.broadcast(
            gl.expand_dims(found, 2), gl.zeros([WARPS, SPAN, ROWS], found.dtype, layout=X)
        )
    return loaded


@jit
def _coming(
    i, rows, given, attended, norm_weight, K: tl.constexpr, NORM: tl.constexpr, WARPS: tl.constexpr,
    FOLDS: tl.constexpr, STEP: tl.constexpr, SPANS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    X: tl.constexpr, ATTENDED: tl.constexpr,
):  # fmt: skip
    """Load the inputs of the span after i: the rows of each fold, and the norm's weights that belong to them."""
    after = i + 1 - (i + 1) // SPANS  # the last span loads its own inputs again, which are not used
    coming, scales = (), ()
    for fold in tl.static_range(FOLDS):
        coming += (
            _input(rows, given, attended, after * STEP, fold, K, WARPS, FOLDS, WHOLE, ROWS, X, ATTENDED),
        )
        if NORM:
            at = after * STEP + tile_columns(fold, 1, X, WARPS, FOLDS)
            scales += (load(norm_weight, at, None, K, WHOLE),)
    return coming, scales


@jit
def _squares(part, WARPS: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr):
    """Return the squares of a part of x [WARPS, SPAN, ROWS] in fp32; if SUMMED, the sums of those that a thread has."""
    found = part.to(tl.float32) * part.to(tl.float32)
    if SUMMED:
        found = gl.sum(gl.sum(gl.reshape(found, [WARPS, SPAN // 32, 4, 8, ROWS]), 3), 1)
    return found


@jit
def _span(
    i,
    held,
    source,
    rows,
    given,
    attended,
    norm_weight,
    sums,
    squares,
    parts,
    scales,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    FOLDS: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
    SPANS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    SUMMED: tl.constexpr,
    MMA: tl.constexpr,
    W: tl.constexpr,
    X: tl.constexpr,
    ATTENDED: tl.constexpr,
):
    """Multiply span i; meanwhile load the rows of the next one and copy the weights of a later one."""
    coming, coming_scales = _coming(
        i, rows, given, attended, norm_weight, K, NORM, WARPS, FOLDS, STEP, SPANS, WHOLE, ROWS, X, ATTENDED
    )
    normed, added = (), ()
    for fold in tl.static_range(FOLDS):
        part = parts[fold]
        if NORM:
            squares += _squares(part, WARPS, ROWS, SUMMED)
            part = apply_weight(part, scales[fold], OFFSET)
        normed += (part,)
    async_copy.wait_group(STAGES - 1)
    nothing = gl.zeros([WARPS, 16, ROWS], tl.float32, layout=MMA)
    stage = i - i // STAGES * STAGES
    for j in tl.static_range(TILES):
        tile = held[j].index(stage).load(W)
        for fold in tl.static_range(FOLDS):
            added += (sums[j * FOLDS + fold] + mma_v2(tile, normed[fold], nothing),)
    if STAGES < SPANS:  # noqa: SIM102 - this is known when the kernel is compiled
        if i + STAGES < SPANS:
            weights, column, output = source
            _copy_weights(
                held, weights, column, output, i + STAGES, N, K, OUTPUTS, TILES, STEP, STAGES, WHOLE
            )
    async_copy.commit_group()  # even an empty group, because the wait counts groups
    return added, squares, coming, coming_scales


@jit
def _added(sums, OUTPUTS: tl.constexpr, PAIR: tl.constexpr, FOLDS: tl.constexpr, ROWS: tl.constexpr):
    """Add up sums [warps, 16, ROWS] over warps and folds: [OUTPUTS, ROWS], or [OUTPUTS, ROWS, 2] of pairs."""
    y = gl.sum(gl.reshape(gl.sum(sums, 0), [OUTPUTS * PAIR, FOLDS, ROWS]), 1)
    if PAIR == 2:
        y = gl.permute(gl.reshape(y, [OUTPUTS, 2, ROWS]), [0, 2, 1])
    return y


@jit
def finish(
    y, up, at, b, scale, carried, bias, out, N: tl.constexpr, STRIDE: tl.constexpr, COUNT: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, BESIDE: tl.constexpr = 0, row_gates=None,
):  # fmt: skip
    """Finish and store the sums y (and `up`), fp32 [outputs, rows], of the outputs `at` and the rows b.

    Rows of `out` are STRIDE apart; `scale` is that of the norm, `carried` the residual; see `linear_kernel`. Return
    what was stored.
    """
    if GATED:  # noqa: SIM102 - this is known when the kernel is compiled
        if NORM:
            up *= gl.expand_dims(scale, 0)
    if NORM:
        y *= gl.expand_dims(scale, 0)
    if GATED:
        if BIAS:
            y += gl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)
            up += gl.load(bias + N + at, mask=at < N, other=0.0).to(tl.float32)
        y = gated(y, up, GATE)
    elif BIAS:
        y += gl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)
    if GATE is not None:  # noqa: SIM102 - this is known when the kernel is compiled
        if GATE.alone:
            y = activate(y, GATE)
    if SCALE != 1.0:
        y *= SCALE
    y = capped(y, CAP)
    if row_gates is not None:
        y *= 1.0 / (1.0 + gl.exp(-gl.load(row_gates + b, mask=b < COUNT, other=0.0).to(tl.float32)))
    if BESIDE:
        y = gated(y, carried, GATE)
    elif RESIDUAL:
        y += carried
    y = y.to(out.dtype.element_ty)
    gl.store(out + b * STRIDE + at, y, mask=(at < N) & (b < COUNT))
    return y


@jit
def begin(PDL: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr):
    """Let the next kernel start, unless this one LEADS. If it FOLLOWS, forget what this multiprocessor has cached."""
    if FOLLOWS:
        fence(PDL, "gpu")
    if not LEADS:
        gdc_launch_dependents(PDL)


@jit
def wait_for_input(PDL: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr):
    """Wait for the kernels before, unless this one FOLLOWS; then let the next one start if it LEADS."""
    if not FOLLOWS:
        gdc_wait(PDL)
    if LEADS:
        gdc_launch_dependents(PDL)


@jit
def head_number(first, HEADS: tl.constexpr):
    """Return the number of the head that output `first` is of; 0 without HEADS (see `linear_kernel`)."""
    return 0 if HEADS is None else first // HEADS.outputs


@jit
def linear_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FOLDS: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    OFFSET: tl.constexpr = 0.0,
    GATE: tl.constexpr = None,
    SCALE: tl.constexpr = 1.0,
    CAP: tl.constexpr = 0.0,
    prepared=None,
    square_sums=None,
    PREPARED: tl.constexpr = 0,
    PREPARES: tl.constexpr = 0,
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
    BY_SPAN: tl.constexpr = False,
):
    """Write out [COUNT, N] = x [COUNT, K] @ weight [N, K] transposed, in their dtype (16 bits); COUNT is 16 at most.

    With NORM, x is normed first, by norm_weight [K] + OFFSET. With BIAS, bias [N] is added. With GATED, weight is [2 N,
    K] (bias [2 N]), gate above up, and out = `gated` of both; without it, a GATE that is `alone` activates the sum. The
    result is multiplied by SCALE and capped by CAP (0: not), then multiplied by the sigmoid of row_gates [COUNT], if
    given. With RESIDUAL, residual [COUNT, N] is added; it may be `out` itself. With BESIDE as well, the sum gates it
    (`gated`) instead, and its rows are BESIDE apart. Pointers that the flags leave unused may be anything.

    With PREPARES, the number of programs, this product also prepares `out` for the next one, which norms it by
    norm_weight [N] + OFFSET: it sets prepared [COUNT, N] to `out` times that, and square_sums fp32 [COUNT, PREPARES] to
    the sum of the squares of each program's outputs. With NORM and PREPARED, x has been prepared like this, and
    square_sums fp32 [COUNT, PREPARED] has the sums of the programs that did it; the weight is not applied again.

    With BY_SPAN, a thread that goes over spans in a loop adds up the squares of each span, which takes fewer registers
    than a sum for each of its places in a span.

    With ATTENDED, the one row of x is not read but `combined` from the parts that the attention has left in partial and
    lse; the columns of a head, with HEADS, are those of a head there.

    With HEADS, the outputs of each head, a multiple of those of a program, are a product of K other columns of x.

    A tile has 16 lines. Each row of weights takes FOLDS of them, adjacent in memory, so that a warp reads 64 * FOLDS
    bytes at once. Every line is multiplied with the columns of every fold, and products with the wrong fold are
    discarded. A program computes TILES * 16 / FOLDS outputs, half as many with GATED; its WARPS warps divide the
    columns. AHEAD is the number of spans of weights that are copied before the first is multiplied.

    A layer may have several products of one input, in different formats. The first of them LEADS: the next one starts
    only when the input is there. The others FOLLOW: they run beside those before them, and wait for them at the end.
    """
    begin(PDL, LEADS, FOLLOWS)
    dtype: tl.constexpr = weight.dtype.element_ty
    MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    W: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=8)
    X: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=8)
    ROWS: tl.constexpr = 8 if COUNT <= 8 else 16
    SQUARES: tl.constexpr = NORM and PREPARED == 0
    PAIR: tl.constexpr = 2 if GATED else 1
    OUTPUTS: tl.constexpr = 16 // (FOLDS * PAIR)
    SUMS: tl.constexpr = gl.BlockedLayout(
        [WARPS, FOLDS * PAIR, 1], [1, OUTPUTS, 32 // OUTPUTS], [1, 1, WARPS], [1, 2, 0]
    )
    STEP: tl.constexpr = WARPS * FOLDS * SPAN
    SPANS: tl.constexpr = (K + STEP - 1) // STEP
    WHOLE: tl.constexpr = SPANS * STEP == K
    LOOPS: tl.constexpr = SPANS * FOLDS > UNROLLED
    SUMMED: tl.constexpr = BY_SPAN and LOOPS
    STAGES: tl.constexpr = AHEAD if AHEAD < SPANS else SPANS

    first = gl.program_id(0) * (TILES * OUTPUTS)
    line = along(1, 16, W)
    output = line // (FOLDS * PAIR)
    matrix_row = output + line // FOLDS % PAIR * N
    weights = weight + first.to(tl.int64) * K + matrix_row * K
    column = tile_columns(line % FOLDS, 2, W, WARPS, FOLDS)
    held = ()  # by tile: between copies to the same memory, all warps would wait for each other
    for _ in tl.static_range(TILES):
        held += (gl.allocate_shared_memory(dtype, [STAGES, WARPS, 16, SPAN], own_layout(WARPS)),)
    for i in tl.static_range(STAGES):
        _copy_weights(held, weights, column, first + output, i, N, K, OUTPUTS, TILES, STEP, STAGES, WHOLE)
        async_copy.commit_group()
    scales = ()
    if SQUARES:
        for fold in tl.static_range(FOLDS):
            scales += (load(norm_weight, tile_columns(fold, 1, X, WARPS, FOLDS), None, K, WHOLE),)
    like = _added(gl.zeros([WARPS, 16, ROWS], tl.float32, layout=SUMS), OUTPUTS, PAIR, FOLDS, ROWS)
    if GATED:
        like, _ = gl.split(like)
    DONE: tl.constexpr = type_layout(like.type)
    n = first + gl.expand_dims(gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, DONE)), 1)
    b = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, DONE)), 0)
    after = ()
    if PREPARES:
        for j in tl.static_range(TILES):
            after += (gl.load(norm_weight + n + j * OUTPUTS, mask=n + j * OUTPUTS < N, other=0.0),)
    attended = None
    if ATTENDED is not None:
        attended = left_parts(partial, lse, active, counters, head_number(first, HEADS), ATTENDED)
    # Everything loaded so far is weights; earlier kernels of the step wrote what is loaded next.
    wait_for_input(PDL, LEADS, FOLLOWS)
    carried = ()
    if RESIDUAL:
        for j in tl.static_range(TILES):
            there = (n + j * OUTPUTS < N) & (b < COUNT)
            at = residual + b * (BESIDE if BESIDE else N) + n + j * OUTPUTS
            carried += (gl.load(at, mask=there, other=0.0).to(tl.float32),)
    rows, given = x + along(2, ROWS, X) * (K if HEADS is None else HEADS.row), along(2, ROWS, X) < COUNT
    if HEADS is not None:
        rows += head_number(first, HEADS) * HEADS.apart
    squares = _squares(gl.zeros([WARPS, SPAN, ROWS], tl.float32, layout=X), WARPS, ROWS, SUMMED)
    sums, parts = (), ()
    for _ in tl.static_range(TILES * FOLDS):
        sums += (gl.zeros([WARPS, 16, ROWS], tl.float32, layout=MMA),)
    for fold in tl.static_range(FOLDS):
        parts += (_input(rows, given, attended, 0, fold, K, WARPS, FOLDS, WHOLE, ROWS, X, ATTENDED),)
    if NORM and PREPARED > 0:
        total = gather_sums(square_sums, PREPARED, COUNT, WARPS, ROWS)
    source = weights, column, first + output
    # fmt: off
    if not LOOPS:
        for i in tl.static_range(SPANS):
            sums, squares, parts, scales = _span(
                i, held, source, rows, given, attended, norm_weight, sums, squares, parts, scales,
                N, K, SQUARES, OUTPUTS, WARPS, FOLDS, TILES, STEP, SPANS, STAGES, WHOLE, ROWS, OFFSET, SUMMED,
                MMA, W, X, ATTENDED,
            )
    else:
        for i in range(SPANS):
            sums, squares, parts, scales = _span(
                i, held, source, rows, given, attended, norm_weight, sums, squares, parts, scales,
                N, K, SQUARES, OUTPUTS, WARPS, FOLDS, TILES, STEP, SPANS, STAGES, WHOLE, ROWS, OFFSET, SUMMED,
                MMA, W, X, ATTENDED,
            )
    # fmt: on
    scale = None
    if SQUARES:
        total = gl.sum(squares, 1)
    if NORM:
        total = gl.sum(gl.convert_layout(total, gl.SliceLayout(1, SUMS)), 0)
        scale = gl.convert_layout(gl.rsqrt(total / K + EPS), gl.SliceLayout(0, DONE))
    left = gl.zeros([OUTPUTS, ROWS], tl.float32, layout=DONE)
    for j in tl.static_range(TILES):
        own = sums[j * FOLDS]
        for fold in tl.static_range(1, FOLDS):
            own = gl.where(along(1, 16, MMA) % FOLDS == fold, sums[j * FOLDS + fold], own)
        y = _added(gl.convert_layout(own, SUMS), OUTPUTS, PAIR, FOLDS, ROWS)
        up = y
        if GATED:
            y, up = gl.split(y)
        # fmt: off
        y = finish(
            y, up, n + j * OUTPUTS, b, scale, carried[j] if RESIDUAL else None, bias, out,
            N, N, COUNT, NORM, BIAS, GATED, RESIDUAL, GATE, SCALE, CAP, BESIDE, row_gates,
        )
        # fmt: on
        if PREPARES:
            left += prepare(y, after[j], n + j * OUTPUTS, b, prepared, N, N, COUNT, OFFSET)
    if PREPARES:
        leave_sums(left, square_sums, PREPARES, COUNT)
    if FOLLOWS:
        gdc_wait(PDL)
