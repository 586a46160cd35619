"""Which experts a token takes, and with which share: the router of a mixture of experts.

The plain twin is `Decoder._mix` in `models/reference/decoder.py`. Sums are made in fp32 and not rounded, in whatever
dtype the router is kept; of experts that score alike, the first ones are taken.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _choose(
    logits,
    selection_bias,
    ids,
    shares,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """ids int32 [CHOSEN] and shares fp32 [CHOSEN] of logits fp32 [COUNT], best first. Every id is one of an expert."""
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    index = tl.arange(0, PADDED)
    inside = index < COUNT
    # Other programs of this kernel wrote them: what the multiprocessor has kept from an earlier layer is not read.
    score = tl.load(logits + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        every = 1.0 / (1.0 + tl.exp(-score))
    else:
        every = tl.exp(score - tl.max(score, 0))
        every = every / tl.sum(every, 0)
    ranked = every
    if SELECTION_BIAS:
        ranked += tl.load(selection_bias + index, mask=inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    place = tl.arange(0, triton.next_power_of_2(CHOSEN))
    found = tl.zeros_like(place)
    taken = tl.zeros_like(place).to(tl.float32)
    for j in tl.static_range(CHOSEN):
        best = tl.max(ranked, 0)
        first = tl.min(tl.where(ranked == best, index, COUNT - 1), 0)  # of what is no number: the last
        share = tl.sum(tl.where(index == first, every, 0.0), 0)
        found = tl.where(place == j, first, found)
        taken = tl.where(place == j, share, taken)
        ranked = tl.where(index == first, float("-inf"), ranked)
    if RENORMALISE:
        taken = taken / tl.maximum(tl.sum(taken, 0), 1e-12)
    tl.store(ids + place, found, mask=place < CHOSEN)
    tl.store(shares + place, taken, mask=place < CHOSEN)


@triton.jit
def router_kernel(
    x,
    weight,
    bias,
    norm_weight,
    selection_bias,
    active,
    logits,
    arrived,
    ids,
    shares,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids int32 [rows, CHOSEN] and shares fp32 [rows, CHOSEN] of x [rows, K], which is normed first.

    weight [COUNT, K] and bias [COUNT] in any dtype; selection_bias fp32 [COUNT]; active int32 [rows]: -1 where a row
    has no sequence, and its ids are -1 then. logits fp32 [rows, COUNT] and arrived int32 [rows], zeros, are this
    kernel's own: programs [cdiv(COUNT, PER), rows] compute PER logits each, and the last one of a row to be done
    chooses.
    """
    gdc_launch_dependents(PDL)
    row = tl.program_id(1)
    expert = tl.program_id(0) * PER + tl.arange(0, PER)[:, None]
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    inside = column < K
    matrix = tl.load(weight + expert * K + column, mask=inside & (expert < COUNT), other=0.0)
    scale = tl.load(norm_weight + column, mask=inside, other=0.0)
    there = tl.load(active + row) >= 0
    gdc_wait(PDL)
    if there:
        given = tl.load(x + row * K + column, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(given * given, 1)
        y = tl.sum(given * scale.to(tl.float32) * matrix.to(tl.float32), 1) * tl.rsqrt(square / K + EPS)
        at = tl.program_id(0) * PER + tl.arange(0, PER)
        if BIAS:
            y += tl.load(bias + at, mask=at < COUNT, other=0.0).to(tl.float32)
        tl.store(logits + row * COUNT + at, y, mask=at < COUNT)
        tl.debug_barrier()  # all threads have written before one of them says so
        before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
        if before == tl.num_programs(0) - 1:
            tl.store(arrived + row, 0)
            first = row * CHOSEN
            _choose(
                logits + row * COUNT,
                selection_bias,
                ids + first,
                shares + first,
                COUNT,
                CHOSEN,
                SELECTION_BIAS,
                SIGMOID,
                RENORMALISE,
            )
    elif tl.program_id(0) == 0:
        place = tl.arange(0, triton.next_power_of_2(CHOSEN))
        tl.store(ids + row * CHOSEN + place, tl.full(place.shape, -1, tl.int32), mask=place < CHOSEN)


@triton.jit
def choose_kernel(
    logits,
    selection_bias,
    ids,
    shares,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """The same choice for tokens whose logits fp32 [T, COUNT] are known; programs [T]."""
    token = tl.program_id(0)
    first = token * CHOSEN
    _choose(
        logits + token * COUNT,
        selection_bias,
        ids + first,
        shares + first,
        COUNT,
        CHOSEN,
        SELECTION_BIAS,
        SIGMOID,
        RENORMALISE,
    )
