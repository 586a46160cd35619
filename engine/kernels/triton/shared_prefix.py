"""Attention to rows that several sequences of a decode step share: they are read once for all of them.

The plain twin is attention without sharing, `engine/attention/sdpa.py`. A tile is up to MEMBERS rows of the batch
whose block tables begin alike; its query heads are one matrix for the tensor cores. `attention_kernel` leaves the
chunks that lie wholly in shared rows to the kernel here, which puts its parts where that would have put them, so that
`combine_kernel` merges them with those of each sequence's own rows. "Hydragen: High-Throughput LLM Inference with
Shared Prefixes" (Juravsky et al. 2024).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.attention import norm_heads
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.paged_attention import attend_tile
from engine.kernels.triton.pointwise import angles, partners, rotate, weighed

TILE = tl.constexpr(64)
"""Rows that a program reads at once; chunks are a multiple of it."""


@triton.jit(do_not_specialize=["table_stride"])
def shared_tile_kernel(
    heads,
    norm_weight,
    rotary,
    cache_k,
    cache_v,
    active,
    tables,
    counters,
    partial,
    lse,
    scale_log2,
    table_stride,
    shared,
    members,
    CHUNKS: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PER: tl.constexpr,
    MEMBERS: tl.constexpr,
    PDL: tl.constexpr,
    PAIRS: tl.constexpr = False,
    EXACT: tl.constexpr = False,
    CAP_LOG2: tl.constexpr = 0.0,
    TOGETHER: tl.constexpr = False,
    OFFSET: tl.constexpr = 0.0,
    ONCE: tl.constexpr = False,
):
    """The parts of PER shared chunks together, for every member of a tile; MEMBERS * G is a power of two from 16 on.

    Arguments as for `attention_kernel`, and shared int32 [rows]: how many rows a sequence shares with its tile; members
    int32 [tiles, MEMBERS]: rows of the batch, -1 for none, the first one there if any. G is the query heads of a KV
    head made a power of two; CHUNK, a multiple of TILE, the rows of a chunk. Programs [HKV, parts, tiles]: part p of a
    sequence takes the place of chunk p.
    """
    gdc_launch_dependents(PDL)
    head = tl.program_id(0)
    part = tl.program_id(1)
    members += tl.program_id(2) * MEMBERS
    GROUP: tl.constexpr = HQ // HKV
    LANES: tl.constexpr = MEMBERS * G
    leader = tl.load(members)
    slot = tl.load(active + leader, mask=leader >= 0, other=-1)
    end = tl.load(shared + leader, mask=slot >= 0, other=0)
    first = part * CHUNK * PER
    end = tl.minimum(end // CHUNK * CHUNK, first + CHUNK * PER)
    if first >= end:
        gdc_wait(PDL)
        return
    table = tables + slot.to(tl.int64) * table_stride

    # Of each lane [LANES, 1]: its row of the batch, its query head, whether it is one.
    lane = tl.arange(0, LANES)[:, None]
    batch = tl.load(members + lane // G)
    slots = tl.load(active + batch, mask=batch >= 0, other=-1)
    position = tl.load(counters + 2 * slots + 1, mask=slots >= 0, other=0)
    real = (slots >= 0) & (lane % G < GROUP)
    lane = head * GROUP + lane % G

    columns = tl.arange(0, D)[None, :]
    inside = real
    if DIM < D:
        inside = real & (columns < DIM)
    others = partners(columns, ROTATED, DIM, PAIRS)
    if ROTATED > 0:
        cosine, sine = angles(rotary + position * ROTATED, columns, ROTATED, DIM, PAIRS)
    gdc_wait(PDL)
    at = (batch * (HQ + 2 * HKV) + lane) * DIM
    q = tl.load(heads + at + columns, mask=inside, other=0.0).to(tl.float32)
    if ROTATED > 0:
        other = tl.load(heads + at + others, mask=inside, other=0.0).to(tl.float32)
    if TOGETHER:
        squares = tl.zeros([LANES, D], tl.float32)
        for g in tl.range(HQ):
            line = batch * (HQ + 2 * HKV) + g
            numbers = tl.load(heads + line * DIM + columns, mask=inside, other=0.0).to(tl.float32)
            squares += numbers * numbers
        scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / (HQ * DIM) + EPS)
    if NORM:
        weight = tl.load(norm_weight + lane * DIM + columns, mask=inside, other=0.0)
        if ROTATED > 0:
            other_weight = tl.load(norm_weight + lane * DIM + others, mask=inside, other=0.0)
        if TOGETHER:
            other = weighed(other, scale, other_weight, OFFSET, ONCE).to(tl.float32) if ROTATED > 0 else q
            q = weighed(q, scale, weight, OFFSET, ONCE).to(tl.float32)
        else:
            other = norm_heads(other, q, other_weight, DIM, EPS, OFFSET, ONCE) if ROTATED > 0 else q
            q = norm_heads(q, q, weight, DIM, EPS, OFFSET, ONCE)
    dtype: tl.constexpr = heads.dtype.element_ty
    q = rotate(q, other, cosine, sine, dtype, EXACT) if ROTATED > 0 else q.to(dtype)

    m = tl.full([LANES], float("-inf"), tl.float32)
    l = tl.zeros([LANES], tl.float32)  # noqa: E741 - the names of the paper
    acc = tl.zeros([LANES, D], tl.float32)
    everything = tl.full([1, TILE], 1, tl.int1)
    for start in tl.range(first, end, TILE):
        seen = start + tl.arange(0, TILE)
        if TILE <= BLOCK:  # both are powers of two: the tile lies in one block
            places = tl.load(table + start // BLOCK).to(tl.int64) * BLOCK + seen % BLOCK
        else:
            places = tl.load(table + seen // BLOCK).to(tl.int64) * BLOCK + seen % BLOCK
        rows = (places[:, None] * HKV + head) * DIM + columns
        if DIM == D:
            k = tl.load(cache_k + rows)
            v = tl.load(cache_v + rows)
        else:
            k = tl.load(cache_k + rows, mask=columns < DIM, other=0.0)
            v = tl.load(cache_v + rows, mask=columns < DIM, other=0.0)
        m, l, acc = attend_tile(q, k, v, everything, m, l, acc, scale_log2, CAP_LOG2)  # noqa: E741
    at = (batch * CHUNKS + part) * HQ + lane
    tl.store(lse + at, (m + tl.log2(l))[:, None], mask=real)
    tl.store(partial + at * DIM + columns, acc / l[:, None], mask=inside)
