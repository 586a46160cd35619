"""The parts of `attention_mma.py` for a quantised cache: it handles two bytes at a time from copies to products.

Two adjacent numbers are read as one of 16 bits, so bytes take the same path as bf16 from the cache to the tensor cores.
There they become two operands of fp16: of K, one has columns 0, 1, 4, 5 and so on, the other 2, 3, 6, 7; of V, one has
the even columns, the other the odd ones. K's scale multiplies the scores, V's scale the weights. So that weights times
V's scale fit fp16, scores are measured against the largest sum of a score and the logarithm of V's scale in its row;
then none is greater than one.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,unreachable"
import triton.language as tl

from engine.kernels.triton.gluon import async_copy, gl, jit, mma_v2
from engine.kernels.triton.kv_bytes import byte_halves, byte_neighbours, byte_unit, quick_log2
from engine.kernels.triton.kv_rows import coded, decoded, row_scale
from engine.kernels.triton.pointwise import capped


@jit
def addresses(
    pointers, table, start, end, local, BLOCK: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr
):
    """Return a place in each of two caches, and how far from it the rows start + local of a block table begin.

    Rows are STRIDE elements apart. There are TILE of them; `start` is a multiple of BLOCK or of TILE.
    """
    if BLOCK % TILE != 0 and TILE % BLOCK != 0:
        rows = start + local
        blocks = gl.load(table + rows // BLOCK, mask=rows < end, other=0).to(tl.int64)
        first, at = 0, (blocks * BLOCK + rows % BLOCK) * STRIDE
    else:
        block = gl.load(table + start // BLOCK, mask=start < end, other=0).to(tl.int64)
        first, at = (block * BLOCK + start % BLOCK) * STRIDE, local % BLOCK * STRIDE
        for j in tl.static_range(1, TILE // BLOCK):
            block = gl.load(table + start // BLOCK + j, mask=start + j * BLOCK < end, other=0).to(tl.int64)
            at = gl.where(local // BLOCK == j, block * (BLOCK * STRIDE) - first + local % BLOCK * STRIDE, at)
    return pointers[0] + first, pointers[1] + first, at


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
    local = gl.arange(0, TILE, layout=gl.SliceLayout(1, ROWS))
    k, v, at = addresses(pairs, table, start, end, local, BLOCK, TILE, ROW // 2)
    at = gl.expand_dims(at, 1) + columns
    there = gl.expand_dims(local < end - start, 1) & (columns < DIM // 2)
    async_copy.async_copy_global_to_shared(keys.index(stage), k + head * (DIM // 2) + at, mask=there)
    async_copy.async_copy_global_to_shared(values.index(stage), v + head * (DIM // 2) + at, mask=there)
    local = gl.arange(0, TILE, layout=LINE)
    k, v, at = addresses(row_scales, table, start, end, local, BLOCK, TILE, ROW // 4)
    async_copy.async_copy_global_to_shared(scales[0].index(stage), k + head + at, mask=local < end - start)
    async_copy.async_copy_global_to_shared(scales[1].index(stage), v + head + at, mask=local < end - start)
    async_copy.commit_group()


@jit
def scale_exponent(size):
    """Return the logarithm to base 2 of a scale of V, at least -30: smaller rows, and those of zeros, add nothing that
    fp16 would show, but their weights count."""
    return quick_log2(gl.maximum(size, 2.0**-30))


@jit
def rounded(x, FP8: tl.constexpr):
    """Round a head x [1, D] of fp32 numbers as it is stored; return codes, scale, inverse scale and decoded numbers."""
    scale, inverse = row_scale(gl.max(gl.max(gl.where(x < 0.0, -x, x), 1), 0), FP8)
    codes = coded(x, inverse, FP8)
    return codes, scale, inverse, decoded(codes, FP8) * scale


@jit
def attend_bytes(
    q, m, l, even, odd, keys, values, scales, pairs, row_scales, table, head, begin, end, scale_log2,  # noqa: E741 - as in the paper
    CAP_LOG2: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, ROW: tl.constexpr, FP8: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Run the online softmax of q [lanes, D] over rows `begin` to `end`; their first STAGES tiles are being copied.

    m (the largest score plus `scale_exponent` its row) and l are [lanes], the sums of the even and of the odd columns
    [lanes, D / 2], in the layout MMA.
    """
    LANES: tl.constexpr = q.shape[0]
    Q: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    K: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    UNIT: tl.constexpr = byte_unit(FP8)
    wide = q.to(tl.float32)
    wide = gl.where(wide > 65504.0, 65504.0, wide)  # the largest fp16; NaN stays NaN
    q = gl.where(wide < -65504.0, -65504.0, wide).to(tl.float16)
    first_q, second_q = gl.split(gl.permute(gl.reshape(q, [LANES, D // 4, 2, 2]), [0, 1, 3, 2]))
    first_q = gl.convert_layout(gl.reshape(first_q, [LANES, D // 2]), Q)
    second_q = gl.convert_layout(gl.reshape(second_q, [LANES, D // 2]), Q)
    column = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, MMA)), 0)
    nothing = gl.zeros([LANES, TILE], tl.float32, layout=MMA)
    spread = gl.where(column == 0, gl.expand_dims(l, 1), nothing)
    stage = 0
    for start in range(begin, end, TILE):
        async_copy.wait_group(STAGES - 1)
        first_k, second_k = byte_neighbours(keys.index(stage).permute((1, 0)).load(K), FP8)
        factor = scales[0].index(stage).load(gl.SliceLayout(0, MMA)) * (scale_log2 * UNIT)
        scores = mma_v2(second_q, second_k, mma_v2(first_q, first_k, nothing))
        scores = capped(scores * gl.expand_dims(factor, 0), CAP_LOG2)
        scores = gl.where(column < end - start, scores, float("-inf"))
        size = scales[1].index(stage).load(gl.SliceLayout(0, MMA)) * UNIT
        highest = gl.maximum(m, gl.max(scores + gl.expand_dims(scale_exponent(size), 0), 1))
        base = gl.where(highest == float("-inf"), 0.0, highest)
        weights = gl.exp2(scores - gl.expand_dims(base, 1))
        shrink = gl.exp2(m - base)
        m = highest
        spread = spread * gl.expand_dims(shrink, 1) + weights
        even_v, odd_v = byte_halves(values.index(stage).load(K), FP8)
        weights *= gl.expand_dims(size, 0)
        weights = gl.convert_layout(weights.to(tl.float16), Q)
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
