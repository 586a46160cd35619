"""Combines the parts that `attention_kernel` leaves inside the product that reads them, without a launch of its own.

The plain twin is `combine_kernel`, which has the same bits for up to IN_ORDER parts. Every program of a product
combines all columns, so this suits products of few programs, with one row of few parts.

PARTS says how: the size of a head, the rows of a part, and the most parts.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc"
import triton.language as tl

from engine.kernels.triton.gluon import gl, jit


@jit
def last_part(active, counters, PARTS: tl.constexpr):
    """Return the number of the last part of the one row; 0 if it has no slot."""
    slot = gl.load(active)
    return gl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32) // PARTS[1]


@jit
def combined(attended, first, within, K: tl.constexpr, PARTS: tl.constexpr):
    """Combine the parts of a row in the columns first [.., .., 1] + within [1, 1, 4], which is 0 to 3: fp32.

    `attended` has partial and lse, as `attention_kernel` leaves them, and the `last_part` of the row. Columns from K on
    are 0.
    """
    DIM: tl.constexpr = PARTS[0]
    MOST: tl.constexpr = PARTS[2]
    partial, lse, last = attended
    at, head = first + within, gl.minimum(first, K - 4) // DIM
    logs = ()
    for part in tl.static_range(MOST):
        place = part * (K // DIM) + head
        logs += (gl.load(lse + place, mask=(head >= 0) & (part <= last), other=-float("inf")),)
    top = logs[0]
    for part in tl.static_range(1, MOST):
        top = gl.maximum(top, logs[part])
    total, mixed = (first * 0).to(tl.float32), (at * 0).to(tl.float32)
    for part in tl.static_range(MOST):
        share = gl.exp2(logs[part] - top)
        mixed += share * gl.load(partial + part * K + at, mask=(at < K) & (part <= last), other=0.0)
        total += share
    return mixed * (1.0 / total)
