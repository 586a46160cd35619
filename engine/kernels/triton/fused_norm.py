"""Norms that two products share: the first leaves what the second needs.

The plain twin is RMSNorm in `models/reference/decoder.py`. x times the norm's weight is rounded, and 1 / RMS multiplies
later.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
import triton
import triton.language as tl

from engine.kernels.triton.columns import SPAN, along, load
from engine.kernels.triton.gluon import gl, jit, multiply, type_layout
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

SHARES = tl.constexpr(8)
"""Into how many shares the sums of squares of a `pending` product are divided."""


@jit
def apply_weight(x, weight, OFFSET: tl.constexpr):
    """Return x times a norm's weight + OFFSET, rounded to the dtype of x."""
    if OFFSET == 0.0:  # noqa: SIM108 - this is known when the kernel is compiled
        found = multiply(x, weight)
    else:
        found = (x.to(tl.float32) * (weight.to(tl.float32) + OFFSET)).to(x.dtype)
    return found


@jit
def prepare(
    y,
    weight,
    at,
    b,
    prepared,
    N: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Store finished outputs y times the weight of the norm that comes next; return their squares in fp32."""
    gl.store(prepared + b * STRIDE + at, apply_weight(y, weight, OFFSET), mask=(at < N) & (b < COUNT))
    y = gl.where(at < N, y.to(tl.float32), 0.0)
    return y * y


@jit
def leave_sums(squares, square_sums, PREPARES: tl.constexpr, COUNT: tl.constexpr):
    """Add up a program's squares [outputs, rows] and store the sum of each row, for `gather_sums`."""
    total = gl.sum(squares, 0)
    row = gl.arange(0, total.shape[0], layout=type_layout(total.type))
    gl.store(square_sums + row * PREPARES + gl.program_id(0), total, mask=row < COUNT)


@jit
def gather_sums(
    square_sums, PREPARED: tl.constexpr, COUNT: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr = 1, SHARES: tl.constexpr = 0,
):  # fmt: skip
    """Add up the sums of squares of PREPARED programs, a share of them in each warp, and return fp32 [WARPS, ROWS].

    RUN neighbouring places have the same row; if there is one row, all have. With SHARES, there are so many shares.
    """
    PARTS: tl.constexpr = SHARES if SHARES else WARPS
    EACH: tl.constexpr = triton.next_power_of_2(max((PREPARED + PARTS - 1) // PARTS, 16))
    L: tl.constexpr = gl.BlockedLayout([1, 4, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    row, program = along(2, ROWS, L), along(0, PARTS, L) * EACH + along(1, EACH, L)
    if RUN > 1:
        row = row // RUN if COUNT > 1 else row * 0
    return gl.sum(
        load(square_sums + row * PREPARED, program, row < COUNT, PREPARED, PARTS * EACH == PREPARED), 1
    )


@jit
def pending_scale(
    square_sums, PREPARED: tl.constexpr, COUNT: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Return SCALE / RMS of the rows of a product from what `leave_sums` stored, as fp32 [1, 1, ROWS].

    Every kernel adds up in the same order, with any number of warps.
    """
    shares = gather_sums(square_sums, PREPARED, COUNT, WARPS, ROWS, RUN, SHARES)
    total = gl.sum(gl.convert_layout(shares, gl.BlockedLayout([SHARES, 1], [1, 32], [1, WARPS], [1, 0])), 0)
    scale = gl.convert_layout(gl.rsqrt(total / K + EPS), gl.SliceLayout(0, gl.SliceLayout(1, X)))
    if SCALE != 1.0:
        scale *= SCALE
    return gl.expand_dims(gl.expand_dims(scale, 0), 1)


@jit
def factor_of_sums(factor):
    """Return the number at `factor`, fp32; 1, which changes no bit, if that is None: in Triton 3.6 no tuple with a None
    may be compared with None."""
    found = gl.to_tensor(1.0)
    if factor is not None:
        found = gl.load(factor).to(tl.float32)
    return found


@jit
def add_pending(parts, products, pending):
    """Return each of `parts` of x plus the norm of what `prepare` stored of a product, rounded to the dtype of x.

    `pending` has 1 / RMS, the factor of the sums, and where and whether they are stored.
    """
    scale, factor, _, _ = pending
    sums = ()
    for number in tl.static_range(len(parts)):
        x = parts[number]
        found = (x.to(tl.float32) + products[number].to(tl.float32) * scale).to(x.dtype)
        sums += ((found.to(tl.float32) * factor).to(x.dtype),)
    return sums


@jit
def store_sum(part, pending, at, given, K: tl.constexpr):
    """Store a part of the sums in the columns `at` of the rows that are `given`, or of all, if this program does."""
    _, _, total, stores = pending
    gl.store(total + at, part, mask=stores & (at < K) if given is None else stores & (at < K) & given)


@jit
def span_squares(part, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Add up the squares of [WARPS, SPAN, ROWS] that a thread has: fp32 [WARPS, 4, ROWS]."""
    part = gl.reshape(part.to(tl.float32), [WARPS, SPAN // 32, 4, 8, ROWS])
    return gl.sum(gl.sum(part * part, 3), 1)


@jit
def add_pending_kernel(
    x,
    addend,
    square_sums,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    PREPARED: tl.constexpr,
    WARPS: tl.constexpr,
    ADD_EPS: tl.constexpr,
    ADD_SCALE: tl.constexpr,
    PDL: tl.constexpr,
    factor=None,
):
    """Do to x [COUNT, K] in place what `linear_kernel` does with an addend, with the same bits.

    The grid is [cdiv(K, 128 * WARPS)].
    """
    gdc_launch_dependents(PDL)
    ROWS: tl.constexpr = 8 if COUNT <= 8 else 16
    X: tl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    row = along(2, ROWS, X)
    at = (gl.program_id(0) * WARPS + along(0, WARPS, X)) * SPAN + along(1, SPAN, X)
    gdc_wait(PDL)
    part = load(x + row * K, at, row < COUNT, K, False)
    product = load(addend + row * K, at, row < COUNT, K, False)
    scale = pending_scale(square_sums, PREPARED, COUNT, WARPS, ROWS, 1, K, ADD_EPS, ADD_SCALE, X)
    pending = scale, factor_of_sums(factor), x + row * K, gl.program_id(0) >= 0
    (found,) = add_pending((part,), (product,), pending)
    store_sum(found, pending, at, row < COUNT, K)
