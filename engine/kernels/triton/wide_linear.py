"""Products of a decode step of more rows than `linear.py` serves, fused with the operations after them.

The plain twin is Linear in `models/reference/decoder.py`, with the gated half of an MLP. A program computes a few
outputs for all rows on tensor cores. As in `linear.py`, it starts to copy weights into shared memory before it waits
for the previous kernel; the rows, which that kernel computes, follow. Products with few outputs are split along the
columns, too. Their partial sums stay separate, in fp32, and the norm after them adds them up (`norm_kernel` of
`prefill.py`), in one order.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc"
import triton.language as tl

from engine.kernels.triton.gluon import async_copy, gl, jit, mma_v2
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.linear import finish


@jit
def _copy(place, at, line, column, some, left, LINES, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Start copying COLUMNS columns of each `line`; lines are K apart. Copies nothing unless `some`.

    Lines from LINES on and columns from `left` on become zeros.
    """
    there = (line < LINES) & (column >= 0) & some
    if K % COLUMNS != 0:
        there = there & (column < left)
    async_copy.async_copy_global_to_shared(place, at + (line * K + column), mask=there)


@jit
def wide_linear_kernel(
    x,
    weight,
    bias,
    out,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    DOWN: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
    GATE: tl.constexpr = None,
):
    """Write out [COUNT, N] = x [COUNT, K] @ weight [N, K] transposed, in their dtype (16 bits).

    BIAS and GATED are as for `linear_kernel`. With SPLIT > 1, which excludes both, out is fp32 [SPLIT, COUNT, N], one
    product for each part of the columns. ROWS is COUNT rounded up to a power of two, at least 16. A program computes
    OUTPUTS outputs, half as many with GATED; it reads COLUMNS columns at a time, with STAGES such steps in flight. DOWN
    of its WARPS warps divide the rows, the others the outputs. The grid is [cdiv(N, outputs of a program), SPLIT].
    """
    gdc_launch_dependents(PDL)
    PAIR: tl.constexpr = 2 if GATED else 1
    OWN: tl.constexpr = OUTPUTS // PAIR
    MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[DOWN, WARPS // DOWN], instr_shape=[16, 8]
    )
    X: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    W: tl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    HELD: tl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    LANES: tl.constexpr = COLUMNS // 8
    # fmt: off
    COPY: tl.constexpr = (
        gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0]) if LANES <= 32
        else gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    )
    # fmt: on
    SPANS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    EACH: tl.constexpr = (SPANS + SPLIT - 1) // SPLIT
    dtype: tl.constexpr = weight.dtype.element_ty
    first = gl.program_id(0) * OWN
    part = gl.program_id(1)
    begin = part * EACH * COLUMNS
    count = tl.minimum(SPANS - part * EACH, EACH)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPY)), 0)
    line = gl.expand_dims(gl.arange(0, OWN, layout=gl.SliceLayout(1, COPY)), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY)), 1)
    held_x = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], HELD)
    held = (gl.allocate_shared_memory(dtype, [STAGES, OWN, COLUMNS], HELD),)
    if GATED:
        held += (gl.allocate_shared_memory(dtype, [STAGES, OWN, COLUMNS], HELD),)
    weight += first.to(tl.int64) * K + begin
    x += begin
    left = K - begin
    weights = (weight,)
    if GATED:
        weights += (weight + N * K,)
    for i in tl.static_range(STAGES):
        for j in tl.static_range(PAIR):
            at = weights[j] + i * COLUMNS
            _copy(held[j].index(i), at, line, column, i < count, left - i * COLUMNS, N - first, K, COLUMNS)
    # Everything copied so far is weights; the previous kernel wrote what is copied next.
    gdc_wait(PDL)
    for i in tl.static_range(STAGES):
        at = x + i * COLUMNS
        _copy(held_x.index(i), at, row, column, i < count, left - i * COLUMNS, COUNT, K, COLUMNS)
        async_copy.commit_group()  # the first group includes all weights that are in flight
    sums = (gl.zeros([ROWS, OWN], tl.float32, layout=MMA),)
    if GATED:
        sums += (gl.zeros([ROWS, OWN], tl.float32, layout=MMA),)
    stage = 0
    for span in range(count):
        async_copy.wait_group(STAGES - 1)
        a = held_x.index(stage).load(X)
        added = ()
        for j in tl.static_range(PAIR):
            added += (mma_v2(a, held[j].index(stage).permute((1, 0)).load(W), sums[j]),)
        sums = added
        coming = (span + STAGES) * COLUMNS
        some = span + STAGES < count
        _copy(held_x.index(stage), x + coming, row, column, some, left - coming, COUNT, K, COLUMNS)
        for j in tl.static_range(PAIR):
            _copy(
                held[j].index(stage),
                weights[j] + coming,
                line,
                column,
                some,
                left - coming,
                N - first,
                K,
                COLUMNS,
            )
        async_copy.commit_group()
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    n = first + gl.expand_dims(gl.arange(0, OWN, layout=gl.SliceLayout(0, MMA)), 0)
    b = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA)), 1)
    # fmt: off
    finish(
        sums[0], sums[PAIR - 1], n, b, None, None, bias, out + part * (COUNT * N),
        N, N, COUNT, False, BIAS, GATED, False, GATE, 1.0, 0.0,
    )
    # fmt: on
