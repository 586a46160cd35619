"""The parts of `attention_mma.py` for a quantised cache: it handles two bytes at a time from copies to products.

Two adjacent numbers are read as one of 16 bits, so bytes take the same path as bf16 from the cache to the tensor cores.
There they become two operands, one of the even columns and one of the odd ones. K's scale multiplies the scores, V's
scale the weights.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,unreachable"
import triton.language as tl

from engine.kernels.triton.gluon import async_copy, byte_pairs, gl, jit, mma_v2
from engine.kernels.triton.kv_rows import coded, decoded, scale_of
from engine.kernels.triton.pointwise import capped


@jit
def _places(table, start, end, rows, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the cache places of `rows` of a block table; `start` is the first of them."""
    if BLOCK % TILE == 0:  # all rows lie in one block
        blocks = gl.load(table + start // BLOCK, mask=start < end, other=0).to(tl.int64)
    else:
        blocks = gl.load(table + rows // BLOCK, mask=rows < end, other=0).to(tl.int64)
    return blocks * BLOCK + rows % BLOCK


@jit
def copy_bytes(
    keys, values, scales, stage, pairs, row_scales, table, head, start, end,
    TILE: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Start copying TILE rows of K and V and their scales from row `start` on; zeros from row `end` on."""
    LANES: tl.constexpr = D // 16
    ROWS: tl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    LINE: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    columns = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, ROWS)), 0)
    rows = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, ROWS))
    places = _places(table, start, end, rows, BLOCK, TILE)
    at = gl.expand_dims(places, 1) * (ROW // 2) + head * (DIM // 2) + columns
    there = gl.expand_dims(rows < end, 1) & (columns < DIM // 2)
    async_copy.async_copy_global_to_shared(keys.index(stage), pairs[0] + at, mask=there)
    async_copy.async_copy_global_to_shared(values.index(stage), pairs[1] + at, mask=there)
    rows = start + gl.arange(0, TILE, layout=LINE)
    at = _places(table, start, end, rows, BLOCK, TILE) * (ROW // 4) + head
    async_copy.async_copy_global_to_shared(scales[0].index(stage), row_scales[0] + at, mask=rows < end)
    async_copy.async_copy_global_to_shared(scales[1].index(stage), row_scales[1] + at, mask=rows < end)
    async_copy.commit_group()


@jit
def rounded(x, FP8: tl.constexpr):
    """Round a head x [1, D] of fp32 numbers as it is stored; return codes, scale, inverse scale and decoded numbers."""
    scale, inverse = scale_of(gl.max(gl.max(gl.where(x < 0.0, -x, x), 1), 0), FP8)
    codes = coded(x, inverse, FP8)
    return codes, scale, inverse, decoded(codes, FP8) * scale


@jit
def attend_bytes(
    q, m, l, even, odd, keys, values, scales, pairs, row_scales, table, head, begin, end, scale_log2,  # noqa: E741 - as in the paper
    CAP_LOG2: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, ROW: tl.constexpr, FP8: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Run the online softmax of q [lanes, D] over rows `begin` to `end`; their first STAGES tiles are being copied.

    m and l are [lanes], the sums of the even and of the odd columns [lanes, D / 2], in the layout MMA.
    """
    LANES: tl.constexpr = q.shape[0]
    Q: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    K: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    dtype: tl.constexpr = q.dtype
    even_q, odd_q = gl.split(gl.reshape(q, [LANES, D // 2, 2]))
    even_q, odd_q = gl.convert_layout(even_q, Q), gl.convert_layout(odd_q, Q)
    column = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, MMA)), 0)
    nothing = gl.zeros([LANES, TILE], tl.float32, layout=MMA)
    spread = gl.where(column == 0, gl.expand_dims(l, 1), nothing)
    stage = 0
    for start in range(begin, end, TILE):
        async_copy.wait_group(STAGES - 1)
        even_k, odd_k = byte_pairs(keys.index(stage).permute((1, 0)).load(K), FP8)
        factor = scales[0].index(stage).load(gl.SliceLayout(0, MMA)) * scale_log2
        scores = mma_v2(odd_q, odd_k, mma_v2(even_q, even_k, nothing))
        scores = capped(scores * gl.expand_dims(factor, 0), CAP_LOG2)
        scores = gl.where(column < end - start, scores, float("-inf"))
        highest = gl.maximum(m, gl.max(scores, 1))
        base = gl.where(highest == float("-inf"), 0.0, highest)
        weights = gl.exp2(scores - gl.expand_dims(base, 1))
        shrink = gl.exp2(m - base)
        m = highest
        spread = spread * gl.expand_dims(shrink, 1) + weights
        even_v, odd_v = byte_pairs(values.index(stage).load(K), FP8)
        weights *= gl.expand_dims(scales[1].index(stage).load(gl.SliceLayout(0, MMA)), 0)
        weights = gl.convert_layout(weights.to(dtype), Q)
        even = mma_v2(weights, even_v, even * gl.expand_dims(shrink, 1))
        odd = mma_v2(weights, odd_v, odd * gl.expand_dims(shrink, 1))
        # fmt: off
        copy_bytes(
            keys, values, scales, stage, pairs, row_scales, table, head, start + STAGES * TILE, end,
            TILE, D, DIM, BLOCK, ROW, WARPS,
        )
        # fmt: on
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    return m, gl.sum(spread, 1), even, odd


@jit
def leave(partial, at, inside, l, even, odd, D: tl.constexpr, DIM: tl.constexpr, MMA: tl.constexpr):  # noqa: E741
    """Store the outputs of lanes; the first number of each goes to `at` [lanes, 1]."""
    columns = 2 * gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, MMA)), 0)
    inside = inside & (columns < DIM)
    gl.store(partial + at + columns, even / gl.expand_dims(l, 1), mask=inside)
    gl.store(partial + at + (columns + 1), odd / gl.expand_dims(l, 1), mask=inside)
