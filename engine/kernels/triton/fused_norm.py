"""Norms that two products share: the first leaves what the second needs.

The plain twin is RMSNorm in `models/reference/decoder.py`. x times the norm's weight is rounded, and 1 / RMS multiplies
later.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
import triton
import triton.language as tl

from engine.kernels.triton.columns import along, load
from engine.kernels.triton.gluon import gl, jit, multiply, type_layout


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
    square_sums, PREPARED: tl.constexpr, COUNT: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr
):
    """Add up the sums of squares of PREPARED programs, a share of them in each warp, and return fp32 [WARPS, ROWS]."""
    EACH: tl.constexpr = triton.next_power_of_2(max((PREPARED + WARPS - 1) // WARPS, 16))
    L: tl.constexpr = gl.BlockedLayout([1, 4, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    row, program = along(2, ROWS, L), along(0, WARPS, L) * EACH + along(1, EACH, L)
    return gl.sum(
        load(square_sums + row * PREPARED, program, row < COUNT, PREPARED, WARPS * EACH == PREPARED), 1
    )
