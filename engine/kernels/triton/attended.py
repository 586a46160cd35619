"""Combines the parts that `attention_kernel` leaves inside the product that reads them, without a launch of its own.

The plain twin is `combine_kernel`, which has the same bits if it adds them IN_ORDER. Every program of a product
combines all columns, so this suits products of few programs, with few rows of few parts.

PARTS says how: the size of a head, the rows of a part, the memory of a row in parts, and the most parts of a row.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc"
import triton.language as tl

from engine.kernels.triton.gluon import gl, jit


@jit
def last_parts(active, counters, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Return the number of the last part of each row; 0 for rows without a slot."""
    lasts = ()
    for row in tl.static_range(COUNT):
        slot = gl.load(active + row)
        lasts += (gl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32) // PARTS[1],)
    return lasts


@jit
def combined(attended, row: tl.constexpr, first, within, K: tl.constexpr, PARTS: tl.constexpr):
    """Combine the parts of a row in the columns first [.., .., 1] + within [1, 1, 4], which is 0 to 3: fp32.

    `attended` has partial and lse, as `attention_kernel` leaves them, and the `last_parts` of the rows. Columns from K
    on are 0.
    """
    DIM: tl.constexpr = PARTS[0]
    PLACES: tl.constexpr = PARTS[2]
    MOST: tl.constexpr = PARTS[3]
    partial, lse, lasts = attended
    last = lasts[row]
    at, head = first + within, gl.minimum(first, K - 4) // DIM
    logs = ()
    for part in tl.static_range(MOST):
        place = (row * PLACES + part) * (K // DIM) + head
        logs += (gl.load(lse + place, mask=(head >= 0) & (part <= last), other=-float("inf")),)
    top = logs[0]
    for part in tl.static_range(1, MOST):
        top = gl.maximum(top, logs[part])
    total, mixed = (first * 0).to(tl.float32), (at * 0).to(tl.float32)
    for part in tl.static_range(MOST):
        share = gl.exp2(logs[part] - top)
        place = (row * PLACES + part) * K + at
        mixed += share * gl.load(partial + place, mask=(at < K) & (part <= last), other=0.0)
        total += share
    return mixed * (1.0 / total)
