"""Products of a decode step of many rows on GPUs whose warps multiply in groups of four (sm_90).

The plain twin is Linear in `models/reference/decoder.py`, with the gated half of an MLP. It does what
`wide_linear_kernel` does for other GPUs. Here one thread asks the GPU to copy whole blocks into shared memory, and the
tensor cores read them there. A program takes most of the shared memory of a multiprocessor and fills it with weights
before it waits for the previous kernel, so the memory is busy while norms and sums run.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc,attr-defined"
import triton.language as tl

from engine.kernels.triton.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    type_layout,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.linear import finish

LINES = tl.constexpr(64)
"""Lines of weights that a program multiplies, twice as many if gated: the fewest of a group of warps."""


@jit
def _wait(sums, OUTSTANDING: tl.constexpr):
    """Return the sums once all but the last OUTSTANDING products have ended."""
    found = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=sums)
    if len(sums) == 1:
        found = (found,)
    return found


@jit
def warpgroup_linear_kernel(
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
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    GATE: tl.constexpr = None,
):
    """Write out [COUNT, N] = x [COUNT, K] @ weight [N, K] transposed, in their dtype (16 bits).

    x and weight are `described` in blocks [ROWS, COLUMNS] and [LINES, COLUMNS]. COUNT, ROWS, BIAS, GATED, COLUMNS,
    STAGES and SPLIT are as for `wide_linear_kernel`. The grid is [cdiv(N, LINES), SPLIT], with four warps.
    """
    gdc_launch_dependents(PDL)
    PAIR: tl.constexpr = 2 if GATED else 1
    BYTES: tl.constexpr = 2 * COLUMNS * (ROWS + PAIR * LINES)
    MMA: tl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    SPANS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    EACH: tl.constexpr = (SPANS + SPLIT - 1) // SPLIT
    first = gl.program_id(0) * LINES
    part = gl.program_id(1)
    begin = part * EACH * COLUMNS
    count = gl.minimum(SPANS - part * EACH, EACH)
    held_x = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, COLUMNS], type_layout(x.type))
    held = ()
    sums = ()
    for _ in tl.static_range(PAIR):
        held += (gl.allocate_shared_memory(x.dtype, [STAGES, LINES, COLUMNS], type_layout(weight.type)),)
        sums += (gl.zeros([LINES, ROWS], tl.float32, layout=MMA),)
    arrived = gl.allocate_shared_memory(tl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in tl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    for i in tl.static_range(STAGES):
        there = arrived.index(i)
        mbarrier.expect(there, BYTES, pred=i < count)
        for j in tl.static_range(PAIR):
            at = [first + j * N, begin + i * COLUMNS]
            tma.async_copy_global_to_shared(weight, at, there, held[j].index(i), pred=i < count)
    # Everything copied so far is weights; the previous kernel wrote what is copied next.
    gdc_wait(PDL)
    for i in tl.static_range(STAGES):
        at = [0, begin + i * COLUMNS]
        tma.async_copy_global_to_shared(x, at, arrived.index(i), held_x.index(i), pred=i < count)
    stage, phase, before = 0, 0, STAGES - 1
    for span in range(count):
        mbarrier.wait(arrived.index(stage), phase)
        rows = held_x.index(stage).permute((1, 0))
        added = ()
        for j in tl.static_range(PAIR):
            added += (warpgroup_mma(held[j].index(stage), rows, sums[j], is_async=True),)
        sums = _wait(added, PAIR)
        # The products of the span before have ended, so that its place is free.
        coming = begin + (span - 1 + STAGES) * COLUMNS
        some = (span > 0) & (span - 1 + STAGES < count)
        there = arrived.index(before)
        mbarrier.expect(there, BYTES, pred=some)
        for j in tl.static_range(PAIR):
            at = [first + j * N, coming]
            tma.async_copy_global_to_shared(weight, at, there, held[j].index(before), pred=some)
        tma.async_copy_global_to_shared(x, [0, coming], there, held_x.index(before), pred=some)
        before = stage
        phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    sums = _wait(sums, 0)
    n = first + gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, MMA)), 1)
    b = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)), 0)
    # fmt: off
    finish(
        sums[0], sums[PAIR - 1], n, b, None, None, bias, out + part * (COUNT * N),
        N, N, COUNT, False, BIAS, GATED, False, GATE, 1.0, 0.0,
    )
    # fmt: on
