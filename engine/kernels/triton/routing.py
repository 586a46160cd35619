"""Chooses the experts of a token and their shares: the router of a mixture of experts.

The plain twin is `Decoder._mix` in `models/reference/decoder.py`. Sums are made in fp32 and not rounded, whatever the
dtype of the router. Among experts with equal scores, the first ones are chosen.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

COMPARED = tl.constexpr(32768)
"""Pairs of experts that are compared at once."""


@triton.jit
def _share(score, top, total, SIGMOID: tl.constexpr):
    return 1.0 / (1.0 + tl.exp(-score)) if SIGMOID else tl.exp(score - top) / total


@triton.jit
def _ranked(share, selection_bias, index, COUNT: tl.constexpr, SELECTION_BIAS: tl.constexpr):
    """Return what experts are ranked by. NaN becomes -inf, before the padding, so each expert has its own rank."""
    if SELECTION_BIAS:
        share += tl.load(selection_bias + index, mask=index < COUNT, other=0.0)
    return tl.where((index < COUNT) & (share == share), share, float("-inf"))


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
    expert_scales=None,
    FACTOR: tl.constexpr = 1.0,
    AXIS: tl.constexpr = 0,
):
    """Choose for tokens whose logits fp32 [T, COUNT] are known: ids int32 [T, CHOSEN] and shares fp32, best first.

    Ids are always valid. In the end, shares are multiplied by FACTOR, and by expert_scales fp32 [COUNT], if given. A
    program chooses for the token of its number along AXIS of the grid.
    """
    row = tl.program_id(AXIS)
    logits, ids, shares = logits + row * COUNT, ids + row * CHOSEN, shares + row * CHOSEN
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    BLOCK: tl.constexpr = min(PADDED, COMPARED // PADDED)
    index = tl.arange(0, PADDED)
    inside = index < COUNT
    # Other programs of this kernel wrote them; the multiprocessor's cache may hold those of an earlier layer.
    score = tl.load(logits + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
    top, total = 0.0, 1.0
    if not SIGMOID:
        top = tl.max(score, 0)
        total = tl.sum(tl.exp(score - top), 0)
    share = _share(score, top, total, SIGMOID)
    mine = _ranked(share, selection_bias, index, COUNT, SELECTION_BIAS)
    rank = tl.zeros([PADDED], tl.int32)
    parts = tl.reshape(mine, [PADDED // BLOCK, BLOCK])
    number = tl.arange(0, PADDED // BLOCK)[:, None]
    # A thread compares its own experts with all others, so no sum leaves it. It needs maxima of the others, which come
    # from shared memory: the compiler would have every thread compute their shares again.
    for part in tl.static_range(PADDED // BLOCK):
        other = part * BLOCK + tl.arange(0, BLOCK)
        theirs = tl.max(tl.where(number == part, parts, float("-inf")), 0)[:, None]
        before = (theirs == mine[None, :]) & (other[:, None] < index[None, :])
        rank += tl.sum(((theirs > mine[None, :]) | before).to(tl.int32), 0)
    taken = rank < CHOSEN
    if RENORMALISE:
        share = share / tl.maximum(tl.sum(tl.where(taken, share, 0.0), 0), 1e-12)
    if FACTOR != 1.0:
        share *= FACTOR
    if expert_scales is not None:
        share *= tl.load(expert_scales + index, mask=inside, other=0.0)
    tl.store(ids + rank, index, mask=taken)
    tl.store(shares + rank, share, mask=taken)


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
    SCALE: tl.constexpr = 1.0,
    expert_scales=None,
    OFFSET: tl.constexpr = 0.0,
    FACTOR: tl.constexpr = 1.0,
    FOLLOWS: tl.constexpr = False,
):
    """Choose for x [rows, K], normed first by norm_weight [K] + OFFSET: ids int32 [rows, CHOSEN] and shares fp32 [rows,
    CHOSEN].

    weight [COUNT, K] and bias [COUNT] in any dtype; selection_bias and expert_scales fp32 [COUNT]; active int32 [rows]:
    -1 for a row without a sequence, whose ids become -1. FACTOR is as in `choose_kernel`. logits fp32 [rows, COUNT],
    which SCALE multiplies, and arrived int32 [rows], zeros, are scratch memory of this kernel. The programs,
    [cdiv(COUNT, PER), rows], compute PER logits each, and the last one of a row to finish chooses. With FOLLOWS, it
    runs beside the product before it, as in `linear_kernel`.
    """
    gdc_launch_dependents(PDL)
    row = tl.program_id(1)
    expert = tl.program_id(0) * PER + tl.arange(0, PER)[:, None]
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    inside = column < K
    matrix = tl.load(weight + expert * K + column, mask=inside & (expert < COUNT), other=0.0)
    scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        scale += OFFSET
    there = tl.load(active + row) >= 0
    if not FOLLOWS:
        gdc_wait(PDL)
    if there:
        # The multiprocessor's cache may hold x as it was before a kernel for whose end this one does not wait.
        given = tl.load(x + row * K + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        square = tl.sum(given * given, 1)
        y = tl.sum(given * scale * matrix.to(tl.float32), 1) * tl.rsqrt(square / K + EPS)
        at = tl.program_id(0) * PER + tl.arange(0, PER)
        if BIAS:
            y += tl.load(bias + at, mask=at < COUNT, other=0.0).to(tl.float32)
        if SCALE != 1.0:
            y *= SCALE
        tl.store(logits + row * COUNT + at, y, mask=at < COUNT)
        tl.debug_barrier()  # all threads must have written before one of them signals it
        before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
        if before == tl.num_programs(0) - 1:
            tl.store(arrived + row, 0)
            choose_kernel(
                logits,
                selection_bias,
                ids,
                shares,
                COUNT,
                CHOSEN,
                SELECTION_BIAS,
                SIGMOID,
                RENORMALISE,
                expert_scales,
                FACTOR,
                AXIS=1,
            )
    elif tl.program_id(0) == 0:
        place = tl.arange(0, triton.next_power_of_2(CHOSEN))
        tl.store(ids + row * CHOSEN + place, tl.full(place.shape, -1, tl.int32), mask=place < CHOSEN)
    if FOLLOWS:
        gdc_wait(PDL)
