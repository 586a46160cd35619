"""Numbers of weights in planes (`models/weights/packing.py`), one at a time: for prompts and embeddings.

The plain twin is `unpack` in `models/weights/packing.py`: the same numbers in fp32, rounded once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl


@triton.jit
def _code(codes, tile, lane, place, BITS: tl.constexpr):
    """Of the thread `lane` of a tile its code number `place`, in one plane."""
    PER: tl.constexpr = 32 // BITS
    word = place // PER
    # What a thread has lies 16 bytes at a time.
    at = word // 4 * 128 + lane * 4 + word % 4 if BITS == 8 else lane * BITS + word
    number = place % PER
    return tl.load(codes + tile * (32 * BITS) + at) >> (number // 2 * BITS + number % 2 * 16) & (
        (1 << BITS) - 1
    )


@triton.jit
def numbers(
    codes, more, scales, supers, row, column, K: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    LESS: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr, SUPERS: tl.constexpr,
):  # fmt: skip
    """The numbers of a matrix with K columns at row and column, int32 tensors of any one shape, in fp32.

    See `packed_linear_kernel` for the planes. Rows and columns must be those of a tile that there is.
    """
    ACROSS: tl.constexpr = (K + 127) // 128
    EACH: tl.constexpr = GROUP // 4
    CHUNKS: tl.constexpr = 128 // GROUP
    tile = row // 8 * ACROSS + column // 128
    chunk, inside = column % 128 // GROUP, column % GROUP
    lane, place = row % 8 * 4 + inside // EACH, chunk * EACH + inside % EACH
    code = _code(codes, tile, lane, place, BITS)
    if MORE > 0:
        code |= _code(more, tile, lane, place, MORE) << BITS
    if BITS == 8:
        code = (code ^ 128) - 128
    value = scales + (tile * 8 + row % 8) * VALUES + chunk
    scale = tl.load(value).to(tl.float32)
    common = supers + ((row // 8 * (ACROSS // 2) + column // 256) * 8 + row % 8) * 2
    if SUPERS:
        scale *= tl.load(common).to(tl.float32)
    number = (code - LESS).to(tl.float32) * scale
    if VALUES > CHUNKS:
        low = tl.load(value + CHUNKS).to(tl.float32)
        if SUPERS:
            number -= low * tl.load(common + 1).to(tl.float32)
        else:
            number += low
    return number


@triton.jit(do_not_specialize=["start"])
def unpack_kernel(
    codes, more, scales, supers, out, start, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    LESS: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr, SUPERS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """out [N, K] = the rows from `start` on of a matrix in planes; programs [cdiv(K, WIDTH), cdiv(N, HEIGHT)]."""
    line = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    there = (line < N) & (column < K)
    row, inside = start + tl.minimum(line, N - 1), tl.minimum(column, K - 1) if K % WIDTH != 0 else column
    value = numbers(codes, more, scales, supers, row, inside, K, BITS, MORE, LESS, GROUP, VALUES, SUPERS)
    tl.store(out + line.to(tl.int64) * K + column, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def packed_rows_kernel(
    ids, codes, more, scales, supers, out, K: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    LESS: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr, SUPERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, K] = the rows ids, int64 [T], of a matrix in planes; programs [cdiv(K, BLOCK), T]."""
    token = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int32)
    inside = tl.minimum(column, K - 1)
    value = numbers(codes, more, scales, supers, row, inside, K, BITS, MORE, LESS, GROUP, VALUES, SUPERS)
    tl.store(out + token.to(tl.int64) * K + column, value.to(out.dtype.element_ty), mask=column < K)


@triton.jit
def packed_embedding_kernel(
    active, token, codes, more, scales, supers, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
    BITS: tl.constexpr, MORE: tl.constexpr, LESS: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr,
    SUPERS: tl.constexpr,
):  # fmt: skip
    """`embedding_kernel` of a matrix in planes. The number is rounded before it is scaled, as there."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1)
    slot = tl.load(active + batch)
    if slot >= 0:
        row = tl.maximum(tl.load(token + slot), 0).to(tl.int32)
        inside = tl.minimum(column, SIZE - 1)
        value = numbers(
            codes, more, scales, supers, row, inside, SIZE, BITS, MORE, LESS, GROUP, VALUES, SUPERS
        )
        x = value.to(out.dtype.element_ty)
        if SCALE != 1.0:
            x = (x.to(tl.float32) * SCALE).to(x.dtype)
        tl.store(out + batch * SIZE + column, x, mask=column < SIZE)
