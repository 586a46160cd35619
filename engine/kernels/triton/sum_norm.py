"""Sum the products of all ranks of a divided model, add them to the residual, and norm the result, in one launch.

It does for several GPUs what `norm_kernel` does for one. In decode steps every rank sends its rows as in `sum_kernel`,
two 16-bit numbers in a word. The rows of a prompt are too many for that: there each rank reads the others' rows where
they are. The ranks' numbers are added in fp32 and in one order, so all ranks get the same bits.

The plain twins: `engine/execute/group.py`, and RMSNorm in `models/reference/decoder.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc"
import triton.language as tl

from engine.kernels.triton.all_reduce import exchange_tag, receive, send, sendable, wait_for
from engine.kernels.triton.gluon import fence, gl, jit, type_layout
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import times, unit, weighed


@jit
def _words(value, PAIRS: tl.constexpr):
    """Return value [n, 2] as words: int32 [n], one for two 16-bit numbers, or int32 [2 n], one for a 32-bit number."""
    if PAIRS:
        low, high = gl.split(value.to(tl.int16, bitcast=True))
        bits = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        bits = gl.reshape(value.to(tl.int32, bitcast=True), [2 * value.shape[0]])
    return bits


@jit
def _numbers(bits, PAIRS: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the numbers that `_words` made into words, as fp32 [n, 2] in LAYOUT."""
    if PAIRS:  # 16 bits are those of bf16, the leading ones of fp32
        low = (bits << 16).to(tl.float32, bitcast=True)
        found = gl.join(low, (bits & -65536).to(tl.float32, bitcast=True))
    else:
        found = gl.reshape(bits.to(tl.float32, bitcast=True), [bits.shape[0] // 2, 2])
    return gl.convert_layout(found, LAYOUT)


@jit(do_not_specialize=["number"])
def sum_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    peers,
    epoch,
    number,
    lost,
    patience,
    START,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ONCE: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    PULL: tl.constexpr,
    PDL: tl.constexpr,
    CUDA: tl.constexpr,
    WARPS: tl.constexpr,
    post_weight=None,
    POST_EPS: tl.constexpr = 0.0,
    POST_OFFSET: tl.constexpr = 0.0,
    POST_ONCE: tl.constexpr = False,
):
    """Write total = residual + SCALE * the sum of x over all ranks, and out = RMSNorm(total); all [T, SIZE].

    x is [PARTS, T, SIZE] in the dtype of `residual` or in fp32. The weights [SIZE], NORM, OFFSET, ONCE and `total` are
    as for `norm_kernel`; `peers`, `epoch`, `number`, RANK, `lost` and `patience` as for `sum_kernel`. Each rank sends
    the sum of its parts, rounded to the dtype of `residual`, to buffers of RANKS * ROOM words. With PULL, x is read
    from the memory of each rank instead, START words from its beginning, ROOM words further for odd tags; PARTS is 1.
    Behind these two places, a word for each rank holds the tag once its x is there, again RANKS words further for odd
    tags.
    WORDS is SIZE / 2 rounded up to a power of two, and at least 32. The grid is [T].
    """
    PAIRS: tl.constexpr = residual.dtype.element_ty.primitive_bitwidth == 16
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    EACH: tl.constexpr = SIZE // 2 if PAIRS else SIZE
    COUNT: tl.constexpr = WORDS if PAIRS else 2 * WORDS
    EVERY: tl.constexpr = 4 if COUNT >= 128 * WARPS else 2 if COUNT >= 64 * WARPS else 1
    dtype: tl.constexpr = residual.dtype.element_ty
    gdc_launch_dependents(PDL)
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.expand_dims(2 * word, 1) + gl.expand_dims(
        gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT)), 0
    )
    inside = column < SIZE
    row = gl.program_id(0).to(tl.int64)
    at = row * SIZE + column
    post = gl.load(post_weight + column, mask=inside, other=0.0) if post_weight is not None else None
    own = gl.load(weight + column, mask=inside, other=0.0) if NORM else None
    gdc_wait(PDL)
    before = gl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tag = exchange_tag(epoch, number)
    mine, longest = gl.load(peers + RANK), gl.load(patience)
    value = gl.zeros([WORDS, 2], tl.float32, layout=LAYOUT)
    if PULL:
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        others = (lane < RANKS) & (lane != RANK)
        flags = START + 2 * ROOM + (tag & 1) * RANKS
        if gl.program_id(0) == 0:
            fence(CUDA, "sys")
            there = gl.load(peers + lane, mask=others, other=0)
            send(there, flags + RANK + lane * 0, lane * 0 + tag.to(tl.int32), others, CUDA)
        told = (mine + (flags + lane) * 4).to(tl.pointer_type(tl.int32))
        wait_for(told, tag.to(tl.int32), others, lost, longest, CUDA)
        fence(CUDA, "sys")
        tl.debug_barrier()  # other threads have seen the words
        place = (START + (tag & 1) * ROOM) * 4
        index = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        for other in tl.static_range(RANKS):
            theirs = (gl.load(peers + other) + place).to(tl.pointer_type(tl.int32)) + row * EACH + index
            # Not from L1, where rows of an earlier sum may be.
            bits = gl.load(theirs, mask=index < EACH, other=0, cache_modifier=".cg")
            value += _numbers(bits, PAIRS, LAYOUT)
    else:
        mixed = gl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            apart = x + at + part * gl.num_programs(0).to(tl.int64) * SIZE
            mixed += gl.load(apart, mask=inside, other=0.0).to(tl.float32)
        bits = sendable(_words(mixed.to(dtype), PAIRS))
        index = gl.arange(0, COUNT, layout=type_layout(bits.type))
        sends = index < EACH
        first = (tag & 1) * (RANKS * ROOM) + row * EACH + index
        for other in tl.static_range(RANKS):
            if other != RANK:
                send(gl.load(peers + other), first + RANK * ROOM, bits, sends, CUDA)
        for other in tl.static_range(RANKS):
            found = bits
            if other != RANK:
                found = receive(mine, first + other * ROOM, sends, lost, longest, CUDA, EVERY)
            value += _numbers(found, PAIRS, LAYOUT)
    if post_weight is not None:
        scale = gl.rsqrt(gl.sum(gl.sum(value * value, 1), 0) / SIZE + POST_EPS)
        value = weighed(value, scale, post, POST_OFFSET, POST_ONCE).to(tl.float32)
    if SCALE != 1.0:
        value *= SCALE
    given = (value + before).to(dtype)
    gl.store(total + at, given, mask=inside)
    if NORM:
        wide = given.to(tl.float32)
        scale = gl.rsqrt(gl.sum(gl.sum(wide * wide, 1), 0) / SIZE + EPS)
        gl.store(out + at, times(unit(wide, scale, dtype, OFFSET, ONCE), own, OFFSET), mask=inside)
