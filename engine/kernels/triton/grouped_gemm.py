"""Products of many tokens with their chosen experts: tokens are grouped by expert, and each group is one product.

The plain twin is `Decoder._mix` in `models/reference/decoder.py`. A token and one of its choices form a pair. Pairs are
sorted by expert, cut into tiles of one expert each, and multiplied tile by tile. The number of tiles is known only on
the device: programs are launched for the most there could be, and those without a tile end at once.

    ids     -> count_kernel, place_kernel -> order, tiles
    x       -> group_kernel (gather, gated) -> inner, in the order of the groups
    inner   -> group_kernel                 -> found, in the order of the pairs
    found   -> sum_kernel                   -> the sum of a token's choices, in their order
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.pointwise import activate, gated
from engine.kernels.triton.unpack import planes_at, tile_numbers


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids, counts, pairs, BLOCK: tl.constexpr):
    """Count how often each expert occurs in ids int32 [pairs]: counts int32 [experts]. The grid is [experts]."""
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + place
        found += (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "most"])
def place_kernel(
    ids, counts, order, tiles, pairs, most, COUNT: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sort the pairs by expert; those of one expert keep their order. The grid is [experts].

    order int32 [pairs]: the sorted pairs. tiles int32 [most, 3]: for each tile of up to HEIGHT pairs its expert, its
    first pair, and the end of the expert's pairs; the expert is -1 after the last tile.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, triton.next_power_of_2(COUNT))
    every = tl.load(counts + index, mask=index < COUNT, other=0)
    before = index < expert
    first = tl.sum(tl.where(before, every, 0), 0)
    own = tl.sum(tl.where(index == expert, every, 0), 0)
    tile = tl.sum(tl.where(before, (every + HEIGHT - 1) // HEIGHT, 0), 0)
    for start in range(0, own, HEIGHT):
        at = tiles + 3 * (tile + start // HEIGHT)
        tl.store(at, expert)
        tl.store(at + 1, first + start)
        tl.store(at + 2, first + own)
    if expert == COUNT - 1:
        for rest in range(tile + (own + HEIGHT - 1) // HEIGHT, most):
            tl.store(tiles + 3 * rest, -1)
    place = tl.arange(0, BLOCK)
    for start in range(0, pairs, BLOCK):
        at = start + place
        is_own = tl.load(ids + at, mask=at < pairs, other=-1) == expert
        number = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + first + number - 1, at, mask=is_own)
        first += tl.max(number, 0)


@triton.jit
def group_kernel(
    x,
    weight,
    order,
    tiles,
    out,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    GATHERS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    bias=None,
    GATE: tl.constexpr = None,
    more=None,
    scales=None,
    supers=None,
    CODES: tl.constexpr = None,
):
    """Multiply the rows of each tile by the weights of its expert. The grid is [cdiv(N, WIDTH), tiles].

    If it GATHERS, x is [T, K] by token, and out [pairs, N] in the order of the groups. With GATED, weight is
    [experts, 2 N, K], gate above up, and out = `gated` of both; without it, weight is [experts, N, K], and GATE
    activates its product. If it does not gather, x is [pairs, K] in the order of the groups, weight [experts, N, K],
    and out [pairs, N] in the order of the pairs. An optional bias [experts, rows of the weight] is added. With CODES,
    weight is the codes of planes (see `packed_linear_kernel`), expert after expert, and a tile of them at a time is
    expanded to numbers.
    """
    tile = tiles + 3 * tl.program_id(1)
    expert = tl.load(tile)
    if expert < 0:
        return
    at = tl.load(tile + 1) + tl.arange(0, HEIGHT)
    given = at < tl.load(tile + 2)
    pair = tl.load(order + at, mask=given, other=0)
    source = pair // CHOSEN if GATHERS else at
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    # Rows and columns beyond the last are multiplied as well, but not written.
    line = n % N if N % WIDTH != 0 else n
    depth = tl.arange(0, DEPTH)
    rows = x + source.to(tl.int64)[:, None] * K + depth[None, :]
    LINES: tl.constexpr = (2 if GATED else 1) * N
    if CODES is None:
        columns = weight + expert.to(tl.int64) * (LINES * K) + line[None, :] * K + depth[:, None]
    else:
        codes, others, own, common = planes_at(weight, more, scales, supers, expert, LINES, K, CODES)
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    ups = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for k in range(0, K, DEPTH):
        inside = k + depth < K
        if K % DEPTH == 0:
            row = tl.load(rows + k, mask=given[:, None], other=0.0)
        else:
            row = tl.load(rows + k, mask=given[:, None] & inside[None, :], other=0.0)
        # fmt: off
        if CODES is not None:
            gate = tl.trans(tile_numbers(codes, others, own, common, line, k, DEPTH, K, CODES).to(row.dtype))
            if GATED:
                up = tl.trans(tile_numbers(codes, others, own, common, N + line, k, DEPTH, K, CODES).to(row.dtype))
        elif K % DEPTH == 0:
            gate = tl.load(columns + k)
            if GATED:
                up = tl.load(columns + N * K + k)
        else:
            gate = tl.load(columns + k, mask=inside[:, None], other=0.0)
            if GATED:
                up = tl.load(columns + N * K + k, mask=inside[:, None], other=0.0)
        # fmt: on
        sums = tl.dot(row, gate, sums, input_precision="ieee")
        if GATED:
            ups = tl.dot(row, up, ups, input_precision="ieee")
    if bias is not None:
        biases = bias + expert.to(tl.int64) * ((2 if GATED else 1) * N) + line
        sums += tl.load(biases).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(biases + N).to(tl.float32)[None, :]
    if GATED:
        sums = gated(sums, ups, GATE)
    elif GATHERS:
        sums = activate(sums, GATE)
    target = at if GATHERS else pair
    tl.store(
        out + target.to(tl.int64)[:, None] * N + n[None, :],
        sums.to(out.dtype.element_ty),
        mask=given[:, None] & (n < N)[None, :],
    )


@triton.jit
def sum_kernel(
    found,
    shares,
    beside,
    out,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write out [T, N] = the sum of share * found [T, CHOSEN, N], best choice first. The grid is [T, cdiv(N, BLOCK)].

    shares fp32 [T, CHOSEN]. With BESIDE, add beside [T, N], the output of the shared expert.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(CHOSEN):
        share = tl.load(shares + token * CHOSEN + j)
        total += share * tl.load(found + (token * CHOSEN + j) * N + n, mask=inside, other=0.0).to(tl.float32)
    if BESIDE:
        total += tl.load(beside + token * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=inside)
