"""Lanes: several columns of a tensor core's sums for a row, among which the groups of columns of its input take turns.

With few rows, most of the eight columns of a tensor core's sums would be unused. So each of one or two rows takes four
of them: the input has another group of its columns in each, every group of weights is multiplied with all four, and
each keeps the product with its own. The products of four groups are then scaled at once, and x is summed four groups at
a time. Three or four rows take two columns each and have two tensors of sums; more rows take one and have four tensors,
which costs registers. A row has the same bits in all of these.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
import triton.language as tl

from engine.kernels.triton.columns import along
from engine.kernels.triton.fused_combine import combined
from engine.kernels.triton.gluon import (
    constexpr_function,
    gl,
    jit,
    lane_layout,
    lane_rows_layout,
    paired,
    type_layout,
)
from engine.kernels.triton.packed import COLUMNS, _four, _two


@constexpr_function
def lane_columns(count, lanes):
    """Return in how many columns of a tensor core's sums each of `count` rows has lanes."""
    return 1 if count > 4 else min(lanes, 4 if count <= 2 else 2)


@jit
def combine_row(
    attended, dtype: tl.constexpr, i, part: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, X: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the inputs of a part of span i from what is `attended`, `paired`: a row in RUN neighbouring columns, and
    again in the others."""
    EACH: tl.constexpr = RUN * GROUP // 4
    L: tl.constexpr = gl.BlockedLayout([1, 1, 4], [1, EACH, 32 // EACH], [WARPS, 1, 1], [2, 1, 0])
    PAIRS: tl.constexpr = type_layout(paired(gl.zeros([WARPS, GROUP, 8], dtype, layout=X)).type)
    first = (i * WARPS + along(0, WARPS, L)) * COLUMNS + part * (RUN * GROUP) + along(1, EACH, L) * 4
    mixed = combined(attended, first, along(2, 4, L), K, PARTS).to(dtype)
    pairs = paired(gl.reshape(mixed, [WARPS, RUN * GROUP, 1]))
    HALF: tl.constexpr = pairs.shape[1] // RUN
    pairs = gl.reshape(pairs, [WARPS, RUN, HALF])
    both = gl.permute(gl.join(pairs, pairs), [0, 2, 3, 1])
    return gl.convert_layout(gl.reshape(both, [WARPS, HALF, 8]), PAIRS)


@jit
def own(products, MMA: tl.constexpr):
    """Return sums [WARPS, 16, 8] with each column from the product of its lane, of two or four products."""
    lane = along(2, 8, MMA)
    found = gl.where(lane % 2 == 0, products[0], products[1])
    if len(products) == 4:
        found = gl.where(lane // 2 % 2 == 0, found, gl.where(lane % 2 == 0, products[2], products[3]))
    return found


@jit
def _spread(value, WARPS: tl.constexpr, LANES: tl.constexpr, MMA: tl.constexpr):
    """Repeat values [WARPS, 16, LANES] in all columns of a tensor core's sums: fp32 [WARPS, 16, 8]."""
    L: tl.constexpr = lane_layout(WARPS, LANES)
    value = gl.expand_dims(gl.convert_layout(value, gl.SliceLayout(2, L)).to(tl.float32), 2)
    value, _ = gl.broadcast(value, gl.zeros([WARPS, 16, 8 // LANES, LANES], tl.float32, layout=L))
    return gl.convert_layout(gl.reshape(value, [WARPS, 16, 8]), MMA)


@jit
def load_lanes(held, WARPS: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, MMA: tl.constexpr):
    """Load what `load_rows` does, LANES values at a time, each in its column: tensors fp32 [WARPS, 16, 8]."""
    L: tl.constexpr = lane_rows_layout(WARPS, VALUES, LANES)
    given = held.load(L)
    if VALUES == 4 * LANES:
        each = _four(gl.permute(gl.reshape(given, [WARPS, 16, 2, 2, LANES]), [0, 1, 4, 2, 3]))
    elif VALUES == 2 * LANES:
        each = _two(gl.permute(gl.reshape(given, [WARPS, 16, 2, LANES]), [0, 1, 3, 2]))
    else:
        each = (given,)
    found, others = (), ()
    for j in tl.static_range(VALUES // LANES):
        value = each[j]
        if value.dtype == tl.uint8:
            others += (_spread(value >> 4, WARPS, LANES, MMA),)
            value = value & 15
        found += (_spread(value, WARPS, LANES, MMA),)
    return found + others


@jit
def together(sums, WARPS: tl.constexpr, LINES: tl.constexpr, RUN: tl.constexpr, FOUND: tl.constexpr):
    """Add up the lanes of sums, neighbouring ones first: [WARPS, LINES, FOUND].

    There is a tensor [WARPS, LINES, columns] for every RUN lanes, which are neighbouring columns.
    """
    if RUN == 4:
        found = gl.sum(gl.sum(gl.reshape(sums[0], [WARPS * LINES, 2, 2, 2]), 3), 2)
        if FOUND == 1:
            found = gl.max(found, 1)  # of two that are equal
        found = gl.reshape(found, [WARPS, LINES, FOUND])
    elif RUN == 2:
        first, second = sums
        first = gl.sum(gl.reshape(first, [WARPS * LINES, 4, 2]), 2)
        found = gl.reshape(
            first + gl.sum(gl.reshape(second, [WARPS * LINES, 4, 2]), 2), [WARPS, LINES, FOUND]
        )
    elif len(sums) == 4:
        found = (sums[0] + sums[1]) + (sums[2] + sums[3])
    else:
        found = sums[0]
    return found
