"""Products with the experts chosen by the rows of a decode step, one row at a time, for 1 to 16 rows.

The plain twin is `Decoder._mix` in `models/reference/decoder.py`. The chosen experts are known only on the device: the
kernels read them where `router_kernel` (`routing.py`) wrote them. Each row reads the weights of its own experts, so it
has the bits that it has alone; rows with the same expert share its weights through the GPU's cache.

    ids, x      -> gate_up_kernel -> inner      one product for each row and choice: `linear_kernel` of that expert
    ids, shares, inner, x -> down_kernel -> x   the chosen experts side by side are one matrix: one sum in one order

Weights in planes are multiplied by `packed_linear_kernel`, which accepts several matrices side by side:
`packed_down_kernel`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc,unreachable"
import triton.language as tl

from engine.kernels.triton.columns import SPAN, along, tile_columns
from engine.kernels.triton.gluon import async_copy, gl, jit, mma_v2, own_layout, type_layout
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.linear import UNROLLED, _added, linear_kernel
from engine.kernels.triton.packed import pick
from engine.kernels.triton.packed_linear import packed_linear_kernel
from engine.kernels.triton.unpack import planes_at


@jit
def gate_up_kernel(
    x,
    ids,
    weight,
    norm_weight,
    out,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    FOLDS: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    bias=None,
    GATE: tl.constexpr = None,
    more=None,
    scales=None,
    supers=None,
    CODES: tl.constexpr = None,
    LANES: tl.constexpr = 1,
    OFFSET: tl.constexpr = 0.0,
    GATED: tl.constexpr = True,
):
    """Write out [rows, CHOSEN, N] = `gated` of gate and up of the chosen experts of x [rows, K], which is normed first,
    by norm_weight [K] + OFFSET.

    weight [experts, 2 N, K], gate above up, and an optional bias [experts, 2 N]; unless GATED, both have N lines, and
    GATE is `alone`. ids int32 [rows, CHOSEN], -1 for a row without a sequence, for which nothing is written. The grid
    is [tiles, CHOSEN, rows]. With CODES, weight is the codes of planes, laid out for each expert as in
    `packed_linear_kernel`, expert after expert.
    """
    # The next kernel may start only once the ids are visible, because it reads them before it waits.
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    LINES: tl.constexpr = 2 * N if GATED else N
    place = gl.program_id(2) * CHOSEN + gl.program_id(1)
    expert = gl.load(ids + place)
    if expert >= 0:
        biases = weight
        if bias is not None:
            biases = bias + expert.to(tl.int64) * LINES
        if CODES is None:
            linear_kernel(
                x + gl.program_id(2) * K,
                weight + expert.to(tl.int64) * (LINES * K),
                biases,
                norm_weight,
                x,
                out + place * N,
                COUNT=1,
                N=N,
                K=K,
                EPS=EPS,
                NORM=True,
                BIAS=bias is not None,
                GATED=GATED,
                RESIDUAL=False,
                FOLDS=FOLDS,
                WARPS=WARPS,
                TILES=TILES,
                AHEAD=AHEAD,
                PDL=False,
                GATE=GATE,
                OFFSET=OFFSET,
            )
        else:
            codes, others, own_scales, own_supers = planes_at(
                weight, more, scales, supers, expert, LINES, K, CODES
            )
            packed_linear_kernel(
                x + gl.program_id(2) * K,
                codes,
                others,
                own_scales,
                own_supers,
                biases,
                norm_weight,
                x,
                out + place * N,
                COUNT=1,
                N=N,
                K=K,
                STRIDE=N,
                EPS=EPS,
                NORM=True,
                BIAS=bias is not None,
                GATED=GATED,
                RESIDUAL=False,
                WARPS=WARPS,
                TILES=TILES,
                AHEAD=AHEAD,
                LANES=LANES,
                CODES=CODES,
                PDL=False,
                GATE=GATE,
                OFFSET=OFFSET,
            )


@jit
def _choice(i, layout: tl.constexpr, WARPS: tl.constexpr, FOLDS: tl.constexpr, WIDTH: tl.constexpr):
    """Return for span i [warps, 1, 1] the chosen expert that its columns belong to."""
    return (i * WARPS + along(0, WARPS, layout)) * (FOLDS * SPAN) // WIDTH


@jit
def _copy_chosen(
    held,
    weight,
    experts,
    line,
    i,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FOLDS: tl.constexpr,
    WARPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    W: tl.constexpr,
):
    """Start copying span i of the lines of the chosen experts; zeros outside of them."""
    choice = _choice(i, W, WARPS, FOLDS, WIDTH)
    fold = along(1, 16, W) % FOLDS
    column = i * (WARPS * FOLDS * SPAN) + tile_columns(fold, 2, W, WARPS, FOLDS) - choice * WIDTH
    at = weight + pick(experts, choice, CHOSEN).to(tl.int64) * (N * K) + line * K + column
    place = held.index(i - i // STAGES * STAGES)
    if WHOLE and N % (16 // FOLDS) == 0:
        async_copy.async_copy_global_to_shared(place, at)
    else:
        there = (column < K) & (choice < CHOSEN) & (line < N)
        async_copy.async_copy_global_to_shared(place, at, mask=there)


@jit
def _load_chosen(
    inner,
    shares,
    i,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    FOLDS: tl.constexpr,
    WARPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X: tl.constexpr,
):
    """Load span i of the row, by fold, each part multiplied by the share of its expert."""
    choice = _choice(i, X, WARPS, FOLDS, WIDTH)
    there = (choice < CHOSEN) & (along(2, 8, X) == 0)
    share = pick(shares, choice, CHOSEN)
    parts = ()
    for fold in tl.static_range(FOLDS):
        column = i * (WARPS * FOLDS * SPAN) + tile_columns(fold, 1, X, WARPS, FOLDS) - choice * WIDTH
        part = gl.load(inner + choice * K + column, mask=there & (column < K), other=0.0)
        parts += ((part.to(tl.float32) * share).to(inner.dtype.element_ty),)
    return parts


@jit
def _span(
    i,
    held,
    source,
    row,
    sums,
    parts,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FOLDS: tl.constexpr,
    WARPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    MMA: tl.constexpr,
    W: tl.constexpr,
    X: tl.constexpr,
):
    """Multiply span i; meanwhile load the row's next span and copy the weights of a later one."""
    after = i + 1 - (i + 1) // SPANS  # after the last span it is the last one again, unused
    inner, shares = row
    coming = _load_chosen(inner, shares, after, CHOSEN, K, FOLDS, WARPS, WIDTH, X)
    async_copy.wait_group(STAGES - 1)
    nothing = gl.zeros([WARPS, 16, 8], tl.float32, layout=MMA)
    tile = held.index(i - i // STAGES * STAGES).load(W)
    added = ()
    for fold in tl.static_range(FOLDS):
        added += (sums[fold] + mma_v2(tile, parts[fold], nothing),)
    if STAGES < SPANS:  # noqa: SIM102 - this is known when the kernel is compiled
        if i + STAGES < SPANS:
            weight, experts, line = source
            _copy_chosen(
                held, weight, experts, line, i + STAGES, CHOSEN, N, K, FOLDS, WARPS, WIDTH, STAGES, WHOLE, W
            )
    async_copy.commit_group()  # even an empty group, because the wait counts groups
    return added, coming


@jit
def down_kernel(
    inner,
    ids,
    shares,
    weight,
    residual,
    out,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FOLDS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    bias=None,
    SCALE: tl.constexpr = 1.0,
):
    """Write out [rows, N] = residual + SCALE * the experts' sum of share * (inner @ down transposed + bias).

    bias [experts, N] is optional. inner [rows, CHOSEN, K]; ids int32 and shares fp32 [rows, CHOSEN], with ids -1 for a
    row without a sequence, for which nothing is written; weight [experts, N, K]; residual may be `out` itself. The grid
    is [cdiv(N, 16 / FOLDS), rows].

    It works like `linear_kernel` on one matrix in which the chosen experts stand side by side. Each is WIDTH columns
    wide; the last of them may be empty, so that the columns of a warp belong to one expert.
    """
    gdc_launch_dependents(PDL)
    dtype: tl.constexpr = weight.dtype.element_ty
    MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    W: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=8)
    X: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=8)
    OUTPUTS: tl.constexpr = 16 // FOLDS
    SUMS: tl.constexpr = gl.BlockedLayout(
        [WARPS, FOLDS, 1], [1, OUTPUTS, 32 // OUTPUTS], [1, 1, WARPS], [1, 2, 0]
    )
    STEP: tl.constexpr = WARPS * FOLDS * SPAN
    WIDTH: tl.constexpr = (K + FOLDS * SPAN - 1) // (FOLDS * SPAN) * (FOLDS * SPAN)
    SPANS: tl.constexpr = (CHOSEN * WIDTH + STEP - 1) // STEP
    WHOLE: tl.constexpr = SPANS * STEP == CHOSEN * K
    STAGES: tl.constexpr = AHEAD if AHEAD < SPANS else SPANS

    first, row = gl.program_id(0) * OUTPUTS, gl.program_id(1)
    # The previous kernel did not write the ids, and this multiprocessor's cache may hold those of another layer.
    experts = ()
    for j in tl.static_range(CHOSEN):
        experts += (gl.load(ids + row * CHOSEN + j, cache_modifier=".cg"),)
    there = experts[0] >= 0
    held = gl.allocate_shared_memory(dtype, [STAGES, WARPS, 16, SPAN], own_layout(WARPS))
    line = first + along(1, 16, W) // FOLDS
    # fmt: off
    if there:
        for i in tl.static_range(STAGES):
            _copy_chosen(held, weight, experts, line, i, CHOSEN, N, K, FOLDS, WARPS, WIDTH, STAGES, WHOLE, W)
            async_copy.commit_group()
    like = _added(gl.zeros([WARPS, 16, 8], tl.float32, layout=SUMS), OUTPUTS, 1, FOLDS, 8)
    DONE: tl.constexpr = type_layout(like.type)
    n = first + gl.expand_dims(gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, DONE)), 1)
    b = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, DONE)), 0)
    place, only = row * N + n + b, (b == 0) & (n < N)
    gdc_wait(PDL)
    if there:
        carried = gl.load(residual + place, mask=only, other=0.0).to(tl.float32)
        source = weight, experts, line
        sums, weights = (), ()
        for j in tl.static_range(CHOSEN):
            weights += (gl.load(shares + row * CHOSEN + j),)
        given = inner + row * (CHOSEN * K), weights
        for _ in tl.static_range(FOLDS):
            sums += (gl.zeros([WARPS, 16, 8], tl.float32, layout=MMA),)
        parts = _load_chosen(given[0], given[1], 0, CHOSEN, K, FOLDS, WARPS, WIDTH, X)
        if SPANS * FOLDS <= UNROLLED:
            for i in tl.static_range(SPANS):
                sums, parts = _span(
                    i, held, source, given, sums, parts,
                    CHOSEN, N, K, FOLDS, WARPS, WIDTH, SPANS, STAGES, WHOLE, MMA, W, X,
                )
        else:
            for i in range(SPANS):
                sums, parts = _span(
                    i, held, source, given, sums, parts,
                    CHOSEN, N, K, FOLDS, WARPS, WIDTH, SPANS, STAGES, WHOLE, MMA, W, X,
                )
        own = sums[0]
        for fold in tl.static_range(1, FOLDS):
            own = gl.where(along(1, 16, MMA) % FOLDS == fold, sums[fold], own)
        y = _added(gl.convert_layout(own, SUMS), OUTPUTS, 1, FOLDS, 8)
        if bias is not None:
            for j in tl.static_range(CHOSEN):
                at = bias + experts[j].to(tl.int64) * N + n
                y += given[1][j] * gl.load(at, mask=n < N, other=0.0).to(tl.float32)
        if SCALE != 1.0:
            y *= SCALE
        gl.store(out + place, (y + carried).to(out.dtype.element_ty), mask=only)
    # fmt: on


@jit
def packed_down_kernel(
    inner,
    ids,
    shares,
    codes,
    more,
    scales,
    supers,
    residual,
    out,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    CODES: tl.constexpr,
    PDL: tl.constexpr,
    bias=None,
    SCALE: tl.constexpr = 1.0,
    LANES: tl.constexpr = 1,
):
    """Do the work of `down_kernel` on weights in planes, expert after expert. The grid is [tiles, rows]."""
    row = gl.program_id(1)
    experts = ()
    for j in tl.static_range(CHOSEN):
        experts += (gl.load(ids + row * CHOSEN + j, cache_modifier=".cg"),)
    if experts[0] >= 0:
        packed_linear_kernel(
            inner + row * (CHOSEN * K),
            codes,
            more,
            scales,
            supers,
            inner if bias is None else bias,
            inner,
            residual + row * N,
            out + row * N,
            COUNT=1,
            N=N,
            K=K,
            STRIDE=N,
            EPS=0.0,
            NORM=False,
            BIAS=bias is not None,
            GATED=False,
            RESIDUAL=True,
            WARPS=WARPS,
            TILES=TILES,
            AHEAD=AHEAD,
            LANES=LANES,
            CODES=CODES,
            PDL=PDL,
            SCALE=SCALE,
            experts=experts,
            shares=shares + row * CHOSEN,
            CHOSEN=CHOSEN,
        )
    else:
        gdc_launch_dependents(PDL)
        gdc_wait(PDL)
