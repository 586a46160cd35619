"""Combines the parts that `attention_kernel` leaves inside the product that reads them, without a launch of its own.

The plain twin is `combine_kernel`, which has the same bits for up to IN_ORDER parts. Every program of a product
combines all columns, so this suits products of few programs, with one row of few parts.

PARTS says how: the size of a head, the rows of a part, the most parts, and the numbers of a part.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc"
import triton.language as tl

from engine.kernels.triton.gluon import gl, jit


@jit
def left_parts(partial, lse, active, counters, head, PARTS: tl.constexpr):
    """Return partial and lse of the one row, from a head on, and the number of its last part; 0 if it has no slot."""
    slot = gl.load(active)
    last = gl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32) // PARTS[1]
    return partial + head * PARTS[0], lse + head, last


@jit
def combined(attended, first, within, K: tl.constexpr, PARTS: tl.constexpr):
    """Combine the parts of a row in the columns first [.., .., 1] + within [1, 1, 4], which is 0 to 3: fp32.

    `attended` are the `left_parts` from the head on with whose columns K begin. Columns from K on are 0.
    """
    DIM: tl.constexpr = PARTS[0]
    MOST: tl.constexpr = PARTS[2]
    SIZE: tl.constexpr = PARTS[3]
    partial, lse, last = attended
    at, head = first + within, gl.minimum(first, K - 4) // DIM
    logs = ()
    for part in tl.static_range(MOST):
        place = part * (SIZE // DIM) + head
        logs += (gl.load(lse + place, mask=(head >= 0) & (part <= last), other=-float("inf")),)
    top = logs[0]
    for part in tl.static_range(1, MOST):
        top = gl.maximum(top, logs[part])
    total, mixed = (first * 0).to(tl.float32), (at * 0).to(tl.float32)
    for part in tl.static_range(MOST):
        share = gl.exp2(logs[part] - top)
        mixed += share * gl.load(partial + part * SIZE + at, mask=(at < K) & (part <= last), other=0.0)
        total += share
    return mixed * (1.0 / total)
