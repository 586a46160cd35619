"""Products of a decode step of one to eight rows, fused with what stands before and after them.

The plain twins are in `models/reference/layers.py`: Linear with the RMSNorm before it, with the residual sum after
it, or the gated half of an MLP. Norms round where those round. What follows a sum of products (bias, activation,
residual) is computed with it in fp32 and rounded once, which comes closer to the truth than a rounding after each.

One program computes some numbers of the output. It loads their weights before it waits for the kernel before it
(programmatic dependent launch), so memory is read without a break from the first kernel of a step to the last. It
holds them while it goes through the rows of the step one after the other: each gets bit for bit what it gets alone.
A tile is [ROWS, steps, WK, WN, 256]: WK warps share the columns of a row, WN warps have rows of their own; a warp
reads 256 columns at once, 16 bytes a thread. Triton hands the axes out to warps from the last one on: so ordered, what
is multiplied lies in the same threads from the load to the sum.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

LANES = tl.constexpr(256)


@triton.jit
def _columns(start: tl.constexpr, WK: tl.constexpr, WN: tl.constexpr, STEPS: tl.constexpr):
    """Column numbers [1, STEPS, WK, WN, 256] from `start` on: the same for every WN."""
    steps = tl.arange(0, WK)[None, :] * STEPS + tl.arange(0, STEPS)[:, None]
    columns = steps[None, :, :, None, None] * LANES + tl.arange(0, LANES)[None, None, None, None, :]
    return columns + start + tl.zeros([1, 1, 1, WN, 1], tl.int32)


@triton.jit
def _load_rows(
    weight,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    WK: tl.constexpr,
    WN: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The tiles of `rows` [ROWS, WN] of weight [N, K]: a tuple over the columns."""
    tiles = ()
    rows = rows[:, None, None, :, None]
    for start in tl.static_range(0, K, WK * STEPS * LANES):
        columns = _columns(start, WK, WN, STEPS)
        at = weight + rows.to(tl.int64) * K + columns
        if N % (ROWS * WN) == 0 and start + WK * STEPS * LANES <= K:
            tiles += (tl.load(at, eviction_policy="evict_first"),)
        else:
            tiles += (tl.load(at, mask=(rows < N) & (columns < K), other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_vector(x, K: tl.constexpr, WK: tl.constexpr, WN: tl.constexpr, STEPS: tl.constexpr):
    """x [K] as a tuple of [1, STEPS, WK, WN, 256], the same for every WN."""
    parts = ()
    for start in tl.static_range(0, K, WK * STEPS * LANES):
        columns = _columns(start, WK, WN, STEPS)
        if start + WK * STEPS * LANES <= K:
            parts += (tl.load(x + columns),)
        else:
            parts += (tl.load(x + columns, mask=columns < K, other=0.0),)
    return parts


@triton.jit
def _norm(parts, weight, K: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm of x: normalise in fp32, cast, then multiply by the weight."""
    dtype: tl.constexpr = parts[0].dtype
    first = parts[0].to(tl.float32)
    squares = tl.sum(first * first, 1)
    for i in tl.static_range(1, len(parts)):
        part = parts[i].to(tl.float32)
        squares += tl.sum(part * part, 1)
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 3), 1) / K + EPS)[:, None, None, :, None]
    normed = ()
    for i in tl.static_range(len(parts)):
        unit = (parts[i].to(tl.float32) * scale).to(dtype).to(tl.float32)
        normed += ((unit * weight[i].to(tl.float32)).to(dtype),)
    return normed


@triton.jit
def _product(tiles, x):
    """Sums over the columns of the tiles times x, fp32 [ROWS, WN]."""
    sums = tl.sum(tiles[0].to(tl.float32) * x[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(tiles)):
        sums += tl.sum(tiles[i].to(tl.float32) * x[i].to(tl.float32), 1)
    return tl.sum(tl.sum(sums, 3), 1)


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    count,
    BATCHED: tl.constexpr,
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

    There are count[0] (int32) rows, one where not BATCHED. NORM: x is normed first. BIAS: bias [N] is added. GATED:
    weight is [2 N, K] (bias [2 N]), gate above up, and out = silu(gate) * up. RESIDUAL: residual [rows, N] is added; it
    may be `out` itself. Pointers that the flags leave unused may be anything. Needs WK * WN warps and
    cdiv(N, WN * ROWS) programs.
    """
    gdc_launch_dependents(PDL)
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = tl.program_id(0) * ROWS * WN + tl.arange(0, WN)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < N
    tiles = _load_rows(weight, rows, N, K, WK, WN, ROWS, STEPS)
    if GATED:
        up_tiles = _load_rows(weight + N * K, rows, N, K, WK, WN, ROWS, STEPS)
    if NORM:
        scale = _load_vector(norm_weight, K, WK, WN, STEPS)
    if BIAS:
        shift = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up_shift = tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
    batches = tl.load(count) if BATCHED else 1
    # What was loaded so far are weights, and how many rows there are; what follows was written by earlier kernels of the step.
    gdc_wait(PDL)
    for batch in tl.range(0, batches):
        parts = _load_vector(x + batch * K, K, WK, WN, STEPS)
        if RESIDUAL:
            carried = tl.load(residual + batch * N + rows, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            parts = _norm(parts, scale, K, EPS)
        y = _product(tiles, parts)
        if BIAS:
            y += shift
        if GATED:
            up = _product(up_tiles, parts)
            if BIAS:
                up += up_shift
            y = y / (1.0 + tl.exp(-y)) * up
        if RESIDUAL:
            y += carried
        tl.store(out + batch * N + rows, y.to(dtype), mask=inside)


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
    """out [rows, K] = RMSNorm(x [rows, K]) of the first count[0] rows, bit for bit as `linear_kernel` of the same WK and
    STEPS does it; one program a row, WK warps."""
    gdc_launch_dependents(PDL)
    batch = tl.program_id(0)
    scale = _load_vector(weight, K, WK, 1, STEPS)
    there = batch < tl.load(count)
    gdc_wait(PDL)
    if there:
        parts = _norm(_load_vector(x + batch * K, K, WK, 1, STEPS), scale, K, EPS)
        for i in tl.static_range(len(parts)):
            columns = _columns(i * WK * STEPS * LANES, WK, 1, STEPS)
            tl.store(out + batch * K + columns, parts[i], mask=columns < K)
