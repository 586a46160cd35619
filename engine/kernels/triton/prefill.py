"""The operations between the products of a prompt's layers, one kernel for each place.

The plain twins: the norms and the MLP in `models/reference/decoder.py`, the rotation in `models/reference/rope.py`.
Norms and rotation round where the twins round; the gated product is rounded once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,union-attr"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import (
    activate,
    angles,
    gated,
    partners,
    query_scale,
    rotate,
    times,
    unit,
    weighed,
)


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr = True,
    OFFSET: tl.constexpr = 0.0,
    ONCE: tl.constexpr = False,
    SCALE: tl.constexpr = 1.0,
    post_weight=None,
    POST_EPS: tl.constexpr = 0.0,
    POST_OFFSET: tl.constexpr = 0.0,
    POST_ONCE: tl.constexpr = False,
    PDL: tl.constexpr = False,
    PARTS: tl.constexpr = 0,
    factor=None,
):
    """Write out = RMSNorm(total) with total = x * SCALE + residual, or x without ADD; all [T, SIZE], weight [SIZE].

    With post_weight [SIZE], x is normed first; with factor [1], the sum is multiplied by it. Both need ADD. Without
    NORM, only total is written. OFFSET and ONCE are as in `weighed`. The grid is [T]. BLOCK is SIZE rounded up to a
    power of two. `total` may be `residual`. With PARTS, x is fp32 [PARTS, T, SIZE] and is summed over its parts; this
    needs ADD as well.
    """
    tl.static_assert(PARTS == 0 or ADD)
    dtype: tl.constexpr = total.dtype.element_ty
    gdc_launch_dependents(PDL)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    post = tl.load(post_weight + columns, mask=inside, other=0.0) if post_weight is not None else None
    own = tl.load(weight + columns, mask=inside, other=0.0) if NORM else None
    gdc_wait(PDL)
    value = tl.load(x + at, mask=inside, other=0.0)
    before = tl.load(residual + at, mask=inside, other=0.0) if ADD else None
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + at + part * tl.num_programs(0).to(tl.int64) * SIZE, mask=inside, other=0.0)
    if post_weight is not None:
        given = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(given * given, 0) / SIZE + POST_EPS)
        value = weighed(given, scale, post, POST_OFFSET, POST_ONCE)
    if ADD:
        given = value.to(tl.float32)
        if SCALE != 1.0:
            given *= SCALE
        value = (given + before.to(tl.float32)).to(dtype)
        if factor is not None:
            value = (value.to(tl.float32) * tl.load(factor).to(tl.float32)).to(dtype)
        tl.store(total + at, value, mask=inside)
    if NORM:
        wide = value.to(tl.float32)
        normed = unit(wide, tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + EPS), dtype, OFFSET, ONCE)
        tl.store(out + at, times(normed, own, OFFSET), mask=inside)


@triton.jit
def position_kernel(
    heads,
    norm_weight,
    rotary,
    positions,
    HEADS: tl.constexpr,
    ALL: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and rotate the first HEADS of heads [T, ALL, D] in place: those of q and k.

    norm_weight [HEADS, D]; rotary [positions, D]: cos beside sin; positions int64 [T]. A program takes BLOCK heads of
    one token as two halves: one thread has both numbers of a rotation, so nothing is overwritten before it is read.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    there = head < HEADS
    columns = tl.arange(0, D // 2)[None, :]
    at = heads + (token * ALL + head) * D + columns
    angle = rotary + tl.load(positions + token) * D + columns
    a = tl.load(at, mask=there, other=0.0)
    b = tl.load(at + D // 2, mask=there, other=0.0)
    dtype: tl.constexpr = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)) / D + EPS)
        weight = norm_weight + head * D + columns
        a = (a * scale).to(dtype).to(tl.float32) * tl.load(weight, mask=there, other=0.0).to(tl.float32)
        b = (b * scale).to(dtype).to(tl.float32) * tl.load(weight + D // 2, mask=there, other=0.0).to(
            tl.float32
        )
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    cosine, sine = tl.load(angle).to(tl.float32), tl.load(angle + D // 2).to(tl.float32)
    first = (a * cosine).to(dtype).to(tl.float32) - (b * sine).to(dtype).to(tl.float32)
    second = (b * cosine).to(dtype).to(tl.float32) + (a * sine).to(dtype).to(tl.float32)
    tl.store(at, first.to(dtype), mask=there)
    tl.store(at + D // 2, second.to(dtype), mask=there)


@triton.jit
def unusual_position_kernel(
    heads, norm_weight, rotary, positions,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    ROTATED: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, TOGETHER: tl.constexpr, OFFSET: tl.constexpr, ONCE: tl.constexpr, LATER: tl.constexpr,
    BETA: tl.constexpr, ORIGINAL: tl.constexpr,
):  # fmt: skip
    """Do the work of `position_kernel` with all features of `attention_kernel`, under the same names.

    PADDED is D rounded up to a power of two. With TOGETHER, one program takes all heads of a token.
    """
    tl.static_assert(BLOCK >= HEADS or not TOGETHER)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    there = (head < HEADS) & (columns < D)
    others = partners(columns, ROTATED, D, PAIRS)
    at = heads + (token * ALL + head) * D
    stored = tl.load(at + columns, mask=there, other=0.0)
    dtype: tl.constexpr = stored.dtype
    x, other = stored.to(tl.float32), tl.load(at + others, mask=there, other=0.0).to(tl.float32)
    if NORM and not LATER:
        squares = tl.sum(x * x, 1, keep_dims=True)
        if TOGETHER:
            of_q = tl.sum(tl.where(head < Q_HEADS, squares, 0.0), 0, keep_dims=True) / (Q_HEADS * D)
            of_k = tl.sum(tl.where(head < Q_HEADS, 0.0, squares), 0, keep_dims=True) / ((HEADS - Q_HEADS) * D)
            scale = tl.rsqrt(tl.where(head < Q_HEADS, of_q, of_k) + EPS)
        else:
            scale = tl.rsqrt(squares / D + EPS)
        weight = norm_weight + head * D
        own = tl.load(weight + columns, mask=there, other=0.0)
        x = weighed(x, scale, own, OFFSET, ONCE).to(tl.float32)
        own = tl.load(weight + others, mask=there, other=0.0)
        other = weighed(other, scale, own, OFFSET, ONCE).to(tl.float32)
    placed = x.to(dtype)
    position = tl.load(positions + token)
    if ROTATED > 0:
        cosine, sine = angles(rotary + position * ROTATED, columns, ROTATED, D, PAIRS)
        placed = rotate(x, other, cosine, sine, dtype, EXACT)
    if LATER:
        x = placed.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + EPS)
        own = tl.load(norm_weight + head * D + columns, mask=there, other=0.0)
        placed = weighed(x, scale, own, OFFSET, ONCE).to(dtype)
    if BETA > 0.0:
        scale = tl.where(head < Q_HEADS, query_scale(position, BETA, ORIGINAL, dtype), 1.0)
        placed = (placed.to(tl.float32) * scale).to(dtype)
    tl.debug_barrier()  # other threads have read what is overwritten now
    tl.store(at + columns, placed, mask=there)


@triton.jit
def gate_kernel(
    gate,
    up,
    out,
    SIZE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    GATE: tl.constexpr = None,
):
    """Write out [T, SIZE] = `gated` of gate and up [T, SIZE], whose rows are so far apart; without up, gate
    activated. The grid is [T, cdiv(SIZE, BLOCK)]."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    found = tl.load(gate + row * GATE_STRIDE + columns, mask=inside, other=0.0)
    if up is None:
        result = activate(found.to(tl.float32), GATE)
    else:
        wide = tl.load(up + row * UP_STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
        result = gated(found.to(tl.float32), wide, GATE)
    tl.store(out + row * SIZE + columns, result.to(found.dtype), mask=inside)
