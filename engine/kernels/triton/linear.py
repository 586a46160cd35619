"""Products of a decode step of one to eight rows, fused with what stands before and after them.

The plain twins are in `models/reference/decoder.py`: Linear with the RMSNorm before it, with the residual sum after
it, or the gated half of an MLP. Norms round where those round. What follows a sum of products (bias, activation,
residual) is computed with it in fp32 and rounded once, which comes closer to the truth than a rounding after each.

One program computes some numbers of the output. It loads their weights before it waits for the kernel before it
(programmatic dependent launch), so memory is read without a break from the first kernel of a step to the last. It
holds them while it goes through the rows of the step one after the other: each gets bit for bit what it gets alone.
A tile is [WK, WN, 256]: WK warps share the columns of a row, WN warps have rows of their own; a warp reads 256
columns at once, 16 bytes a thread. What a warp has more of is a tuple of tiles and not another axis: Triton hands
axes out to warps in an order that differs from version to version, and what is multiplied must lie in the same
threads from the load to the sum.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

LANES = tl.constexpr(256)


@triton.jit
def _columns(part: tl.constexpr, WK: tl.constexpr, WN: tl.constexpr, STEPS: tl.constexpr):
    """Column numbers [WK, WN, 256] of a part: the same for every WN; a warp has STEPS parts side by side."""
    first = part // STEPS * WK * STEPS + part % STEPS
    warps = tl.arange(0, WK)[:, None, None] * STEPS + tl.zeros([1, WN, 1], tl.int32)
    return (first + warps) * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def _load_rows(
    weight,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    WK: tl.constexpr,
    WN: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The tiles of weight [N, K]: for each of ROWS rows from `first` [1, WN, 1] on a tuple over the columns, flat."""
    tiles = ()
    for i in tl.static_range(ROWS):
        row = first + i
        for part in tl.static_range(PARTS):
            columns = _columns(part, WK, WN, STEPS)
            at = weight + row.to(tl.int64) * K + columns
            if N % (ROWS * WN) == 0 and PARTS * WK * LANES == K:
                tiles += (tl.load(at, eviction_policy="evict_first"),)
            else:
                inside = (row < N) & (columns < K)
                tiles += (tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_vector(
    x, K: tl.constexpr, WK: tl.constexpr, WN: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr
):
    """x [K] as a tuple of [WK, WN, 256], the same for every WN."""
    parts = ()
    for part in tl.static_range(PARTS):
        columns = _columns(part, WK, WN, STEPS)
        if PARTS * WK * LANES == K:
            parts += (tl.load(x + columns),)
        else:
            parts += (tl.load(x + columns, mask=columns < K, other=0.0),)
    return parts


@triton.jit
def _norm(parts, weight, K: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm of x: normalise in fp32, cast, then multiply by the weight."""
    dtype: tl.constexpr = parts[0].dtype
    first = parts[0].to(tl.float32)
    squares = first * first
    for i in tl.static_range(1, len(parts)):
        part = parts[i].to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / K + EPS)[None, :, None]
    normed = ()
    for i in tl.static_range(len(parts)):
        unit = (parts[i].to(tl.float32) * scale).to(dtype).to(tl.float32)
        normed += ((unit * weight[i].to(tl.float32)).to(dtype),)
    return normed


@triton.jit
def _products(tiles, x, ROWS: tl.constexpr):
    """Sums over the columns of the tiles of each row times x, a tuple of fp32 [WN]."""
    sums = ()
    for row in tl.static_range(ROWS):
        part = tiles[row * len(x)].to(tl.float32) * x[0].to(tl.float32)
        for i in tl.static_range(1, len(x)):
            part += tiles[row * len(x) + i].to(tl.float32) * x[i].to(tl.float32)
        sums += (tl.sum(part, 2),)
    return _across(sums)


@triton.jit
def _across(sums):
    """The sums of the warps, a tuple of [WK, WN], added up; four at a time, so that warps wait for each other less."""
    added = ()
    for i in tl.static_range(0, len(sums) // 4 * 4, 4):
        pairs = tl.join(tl.join(sums[i], sums[i + 2]), tl.join(sums[i + 1], sums[i + 3]))
        even, odd = tl.split(tl.sum(pairs, 0))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        added += (first, second, third, fourth)
    for i in tl.static_range(len(sums) // 4 * 4, len(sums)):
        added += (tl.sum(sums[i], 0),)
    return added


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    count,
    TOGETHER: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WK: tl.constexpr,
    WN: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows, N] = x [rows, K] @ weight [N, K] transposed, in their dtype.

    There are count[0] (int32) rows, which pass TOGETHER at a time, so that some wait for memory while others
    compute: x and residual have room for a multiple of it. Where it is 1, there is one row. NORM: x is normed
    first. BIAS: bias [N] is added. GATED: weight is [2 N, K] (bias [2 N]), gate above up, and out = silu(gate) *
    up. RESIDUAL: residual [rows, N] is added; it may be `out` itself. Pointers that the flags leave unused may be
    anything. Needs WK * WN warps and cdiv(N, WN * ROWS) programs.
    """
    gdc_launch_dependents(PDL)
    dtype: tl.constexpr = weight.dtype.element_ty
    PARTS: tl.constexpr = (K + WK * STEPS * LANES - 1) // (WK * STEPS * LANES) * STEPS
    first = (tl.program_id(0) * WN + tl.arange(0, WN)) * ROWS
    tiles = _load_rows(weight, first[None, :, None], N, K, WK, WN, ROWS, PARTS, STEPS)
    if GATED:
        up_tiles = _load_rows(weight + N * K, first[None, :, None], N, K, WK, WN, ROWS, PARTS, STEPS)
    if NORM:
        scale = _load_vector(norm_weight, K, WK, WN, PARTS, STEPS)
    shift, up_shift = (), ()
    if BIAS:
        for i in tl.static_range(ROWS):
            shift += (tl.load(bias + first + i, mask=first + i < N, other=0.0).to(tl.float32),)
            if GATED:
                up_shift += (tl.load(bias + N + first + i, mask=first + i < N, other=0.0).to(tl.float32),)
    batches = tl.load(count) if TOGETHER > 1 else 1
    # What was loaded so far are weights, and how many rows there are; earlier kernels of the step wrote what follows.
    gdc_wait(PDL)
    for batch in tl.range(0, batches, TOGETHER):
        results = ()
        for b in tl.static_range(TOGETHER):
            parts = _load_vector(x + (batch + b) * K, K, WK, WN, PARTS, STEPS)
            carried = ()
            if RESIDUAL:
                for i in tl.static_range(ROWS):
                    at = residual + (batch + b) * N + first + i
                    carried += (tl.load(at, mask=first + i < N, other=0.0).to(tl.float32),)
            if NORM:
                parts = _norm(parts, scale, K, EPS)
            sums = _products(tiles, parts, ROWS)
            if GATED:
                up_sums = _products(up_tiles, parts, ROWS)
            for i in tl.static_range(ROWS):
                y = sums[i]
                if BIAS:
                    y += shift[i]
                if GATED:
                    up = up_sums[i]
                    if BIAS:
                        up += up_shift[i]
                    y = y / (1.0 + tl.exp(-y)) * up
                if RESIDUAL:
                    y += carried[i]
                results += (y.to(dtype),)
        # After all loads: `out` may be what was loaded.
        for b in tl.static_range(TOGETHER):
            for i in tl.static_range(ROWS):
                inside = (first + i < N) & (batch + b < batches)
                tl.store(out + (batch + b) * N + first + i, results[b * ROWS + i], mask=inside)


@triton.jit
def rows_norm_kernel(
    x,
    weight,
    out,
    count,
    K: tl.constexpr,
    EPS: tl.constexpr,
    WK: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows, K] = RMSNorm(x [rows, K]) of the first count[0] rows; one program a row, WK warps.

    Bit for bit as `linear_kernel` of the same WK and STEPS does it.
    """
    gdc_launch_dependents(PDL)
    batch = tl.program_id(0)
    PARTS: tl.constexpr = (K + WK * STEPS * LANES - 1) // (WK * STEPS * LANES) * STEPS
    scale = _load_vector(weight, K, WK, 1, PARTS, STEPS)
    there = batch < tl.load(count)
    gdc_wait(PDL)
    if there:
        parts = _norm(_load_vector(x + batch * K, K, WK, 1, PARTS, STEPS), scale, K, EPS)
        for i in tl.static_range(len(parts)):
            columns = _columns(i, WK, 1, STEPS)
            tl.store(out + batch * K + columns, parts[i], mask=columns < K)
