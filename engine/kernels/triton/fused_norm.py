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
"""Into how many shares `add_prepared_kernel` divides the sums of squares."""


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
    SHARES: tl.constexpr = 0,
):  # fmt: skip
    """Add up the sums of squares of PREPARED programs, a share of them in each warp, and return fp32 [WARPS, ROWS].

    With SHARES, there are so many shares.
    """
    PARTS: tl.constexpr = SHARES if SHARES else WARPS
    EACH: tl.constexpr = triton.next_power_of_2(max((PREPARED + PARTS - 1) // PARTS, 16))
    L: tl.constexpr = gl.BlockedLayout([1, 4, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    row, program = along(2, ROWS, L), along(0, PARTS, L) * EACH + along(1, EACH, L)
    return gl.sum(
        load(square_sums + row * PREPARED, program, row < COUNT, PREPARED, PARTS * EACH == PREPARED), 1
    )


@jit
def add_prepared_kernel(
    x,
    prepared,
    square_sums,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    PREPARED: tl.constexpr,
    WARPS: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
    factor=None,
):
    """Set x [COUNT, K] to (x + SCALE * norm) * factor [1], with the norm of what a product has prepared.

    PREPARED programs have left sums of squares. The norm has the epsilon EPS, and x is rounded before the factor
    multiplies it. The grid is [cdiv(K, 128 * WARPS)]; COUNT is 16 at most.
    """
    gdc_launch_dependents(PDL)
    ROWS: tl.constexpr = 8 if COUNT <= 8 else 16
    X: tl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    row = along(2, ROWS, X)
    at = (gl.program_id(0) * WARPS + along(0, WARPS, X)) * SPAN + along(1, SPAN, X)
    gdc_wait(PDL)
    own = load(x + row * K, at, row < COUNT, K, False)
    product = load(prepared + row * K, at, row < COUNT, K, False)
    shares = gather_sums(square_sums, PREPARED, COUNT, WARPS, ROWS, SHARES)
    total = gl.sum(gl.convert_layout(shares, gl.BlockedLayout([SHARES, 1], [1, 32], [1, WARPS], [1, 0])), 0)
    scale = gl.convert_layout(gl.rsqrt(total / K + EPS), gl.SliceLayout(0, gl.SliceLayout(1, X))) * SCALE
    scale = gl.expand_dims(gl.expand_dims(scale, 0), 1)
    found = (own.to(tl.float32) + product.to(tl.float32) * scale).to(own.dtype)
    if factor is not None:
        found = (found.to(tl.float32) * gl.load(factor).to(tl.float32)).to(own.dtype)
    gl.store(x + row * K + at, found, mask=(at < K) & (row < COUNT))
