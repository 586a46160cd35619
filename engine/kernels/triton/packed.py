"""Weights in planes (`models/weights/packing.py`) as operands of tensor cores, for kernels in Gluon.

A code of up to seven bits is put behind the leading bits of 128: one shift and one mask turn two codes into the bf16 of
128 + code. The excess, (128 + offset) times the sum of each group's activations, is subtracted from the sums; a product
with a constant gives these sums of activations for all rows of weights. A signed code of eight bits is 128 + its lower
seven bits, minus 128, or minus 256 if it is negative. A code of MXFP4 or fp8 is a small floating-point number, whose
bits are put where a bf16 has them; a code of IQ4_NL is looked up. Scales multiply the sum of a group, in fp32.

Adjacent columns need not belong to one matrix: with `experts`, the columns of each chosen expert follow one another.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated,misc"
import triton.language as tl

from engine.kernels.triton.columns import along
from engine.kernels.triton.gluon import (
    async_copy,
    eighth_halves,
    gl,
    halves,
    jit,
    looked_up,
    masked,
    row_layout,
    signed_halves,
    small_halves,
)

COLUMNS = tl.constexpr(128)
"""Columns of a tile, which has eight rows."""


@jit
def matrix_choice(i, L: tl.constexpr, WARPS: tl.constexpr, ACROSS: tl.constexpr):
    """Return which of the matrices side by side each warp's tile of columns in span i belongs to: [WARPS, 1, 1]."""
    return (i * WARPS + along(0, WARPS, L)) // ACROSS


@jit
def pick(numbers, choice, CHOSEN: tl.constexpr):
    """Return numbers[choice] of CHOSEN numbers, by comparisons: indexed loads would be repeated for every register that
    a tensor core reads."""
    found = gl.where(choice == 0, numbers[0], numbers[CHOSEN - 1])
    for j in tl.static_range(1, CHOSEN - 1):
        found = gl.where(choice == j, numbers[j], found)
    return found


@jit
def _copy(
    held, plane, first, DOWN: tl.constexpr, i, experts, L: tl.constexpr, WARPS: tl.constexpr, LINES: tl.constexpr,
    SIZE: tl.constexpr, PER: tl.constexpr, ACROSS: tl.constexpr, CHOSEN: tl.constexpr, UP: tl.constexpr,
    LAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Start copying [WARPS, LINES, SIZE] of two tiles per warp, which lie contiguously by line and then by size.

    The tiles lie DOWN tiles of rows below `first`, the second one another UP. PER tiles of columns share the data. With
    MASKED, zeros take the place of data beyond the ACROSS tiles of columns (of each of CHOSEN matrices) and the LAST
    tiles of rows (if the second half starts at UP, LAST from there on).
    """
    TILE: tl.constexpr = LINES // 2 * SIZE
    BELOW: tl.constexpr = (ACROSS + PER - 1) // PER * TILE
    half, line = along(1, LINES, L) // (LINES // 2), along(1, LINES, L) % (LINES // 2)
    whole = i * WARPS + along(0, WARPS, L)
    if CHOSEN == 1 and WARPS % PER == 0:
        # What is the same in every span comes first, so that it is computed once. A constant distance comes last, so
        # that the copying instruction itself can add it.
        if experts is not None:
            plane += experts[0].to(tl.int64) * (LAST * BELOW)
        at = first * BELOW + along(0, WARPS, L) // PER * TILE + line * SIZE + along(2, SIZE, L)
        if LINES > 2:
            at = plane + (at + half * (UP * BELOW)) + i * (WARPS // PER * TILE)
        else:
            at = plane + at + i * (WARPS // PER * TILE) + half * (UP * BELOW)
    else:
        column = whole
        if experts is not None:
            choice = matrix_choice(i, L, WARPS, ACROSS)
            column -= choice * ACROSS
            plane += pick(experts, choice, CHOSEN).to(tl.int64) * (LAST * BELOW)
        at = (first + half * UP) * BELOW + column // PER * TILE + line * SIZE
        at = plane + (at + along(2, SIZE, L))
    at += DOWN * BELOW
    if MASKED:
        bound = LAST if UP == 1 else LAST + half * UP
        there = (first + half * UP < bound - DOWN) & (whole < ACROSS * CHOSEN) & (along(2, SIZE, L) >= 0)
        async_copy.async_copy_global_to_shared(held, at, mask=there)
    else:
        async_copy.async_copy_global_to_shared(held, at)


@jit
def copy_codes(
    held, plane, first, DOWN: tl.constexpr, i, experts, BITS: tl.constexpr, WARPS: tl.constexpr, ACROSS: tl.constexpr,
    CHOSEN: tl.constexpr, UP: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Start copying the words of a plane: 16 bytes per thread, or fewer for planes of two bits or one."""
    L: tl.constexpr = gl.BlockedLayout([1, 2, 4 if BITS >= 4 else BITS], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    _copy(held, plane, first, DOWN, i, experts, L, WARPS, 2, 32 * BITS, 1, ACROSS, CHOSEN, UP, LAST, MASKED)


@jit
def copy_rows(
    held, plane, first, DOWN: tl.constexpr, i, experts, VALUES: tl.constexpr, PER: tl.constexpr, WARPS: tl.constexpr,
    ACROSS: tl.constexpr, CHOSEN: tl.constexpr, UP: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Start copying VALUES values for each row, of 8, 16 or 32 bits."""
    BYTES: tl.constexpr = plane.dtype.element_ty.primitive_bitwidth // 8
    EACH: tl.constexpr = max(VALUES * BYTES // 8, 4) // BYTES
    L: tl.constexpr = gl.BlockedLayout(
        [1, 1, EACH], [1, 32 * EACH // VALUES, VALUES // EACH], [WARPS, 1, 1], [2, 1, 0]
    )
    _copy(held, plane, first, DOWN, i, experts, L, WARPS, 16, VALUES, PER, ACROSS, CHOSEN, UP, LAST, MASKED)


@jit
def _two(given):
    """Split [..., 2] into two tensors [...]."""
    first, second = gl.split(given)
    return first, second


@jit
def _four(given):
    """Split [..., 2, 2] into four tensors [...]."""
    even, odd = gl.split(given)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@jit
def _eight(given):
    """Split [..., 2, 2, 2] into eight tensors [...]."""
    even, odd = gl.split(given)
    a, c, e, g = _four(even)
    b, d, f, h = _four(odd)
    return a, b, c, d, e, f, g, h


@jit
def load_words(held, WARPS: tl.constexpr, BITS: tl.constexpr):
    """Load the words of a plane that belong to a thread, in order: BITS tensors int32 [WARPS, 2, 32]."""
    L: tl.constexpr = gl.BlockedLayout([1, 2, 4 if BITS >= 4 else BITS], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    words = held.load(L)
    if BITS == 8:
        found = _eight(gl.permute(gl.reshape(words, [WARPS, 2, 2, 32, 2, 2]), [0, 1, 3, 2, 4, 5]))
    elif BITS == 4:
        found = _four(gl.reshape(words, [WARPS, 2, 32, 2, 2]))
    elif BITS == 2:
        found = _two(gl.reshape(words, [WARPS, 2, 32, 2]))
    else:
        found = (words,)
    PLAIN: tl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    alike = ()
    for i in tl.static_range(BITS):
        alike += (gl.convert_layout(found[i], PLAIN),)
    return alike


@jit
def _shifted(word, BITS: tl.constexpr):
    """Shift right, or left if BITS is negative."""
    if BITS > 0:
        word = word >> BITS
    elif BITS < 0:
        word = word << -BITS
    return word


@jit
def _bits(words, rest, pair: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr):
    """Put the codes of a pair in one plane at bit LOW of each half, beside the bits of `rest`."""
    MASK: tl.constexpr = (((1 << BITS) - 1) * 0x10001) << LOW
    return masked(_shifted(words[pair // (16 // BITS)], pair % (16 // BITS) * BITS - LOW), MASK, rest)


@jit
def _pair(first, second, pair: tl.constexpr, CODES: tl.constexpr):
    """Return the numbers of a pair of codes, [WARPS, 2, 32, 2]; they are 128 too large if the codes are unsigned."""
    if CODES.floats == 2:
        found = halves(first[pair])
    elif (
        CODES.floats == 3
    ):  # a sign, four bits of an exponent and three of a fraction: bits 15, 10 to 7 and 6 to 4 of a bf16
        word = first[pair // 2]
        ODD: tl.constexpr = pair % 2
        size = _shifted(word, 4 if ODD else -4) & 0x07F007F0
        found = eighth_halves(masked(_shifted(word, 0 if ODD else -8), -0x7FFF8000, size))
    elif (
        CODES.floats == 1
    ):  # a sign, two bits of an exponent and one of a fraction: bits 15, 8 to 7 and 6 of a bf16
        word = first[pair // 4]
        AT: tl.constexpr = pair % 4 * 4
        found = small_halves(
            masked(_shifted(word, AT - 12), -0x7FFF8000, _shifted(word, AT - 6) & 0x01C001C0)
        )
    elif CODES.bits == 8:
        word = first[pair // 2]
        if pair % 2 == 1:
            word = word >> 8
        found = signed_halves(masked(word, 0x007F007F, 0x43004300), masked(word, 0x00800080, 0x43004300))
    else:
        digits = _bits(first, 0x43004300, pair, CODES.bits, 0)
        if CODES.more > 0:
            digits = _bits(second, digits, pair, CODES.more, CODES.bits)
        found = halves(digits)
    return found


@jit
def operand(first, second, chunk: tl.constexpr, WARPS: tl.constexpr, CODES: tl.constexpr, W: tl.constexpr):
    """Return the numbers [WARPS, 16, GROUP] of two tiles in the columns of group `chunk`; see `_pair`."""
    COUNT: tl.constexpr = CODES.group // 8
    FIRST: tl.constexpr = 0 if CODES.floats == 2 else chunk * COUNT
    if CODES.floats == 2:
        first = looked_up(first[chunk])
    pairs = ()
    for i in tl.static_range(COUNT):
        pairs += (_pair(first, second, FIRST + i, CODES),)
    joined = gl.join(pairs[0], pairs[1])
    if COUNT == 4:
        joined = gl.join(joined, gl.join(pairs[2], pairs[3]))
        joined = gl.permute(joined, [0, 1, 2, 5, 4, 3])
    else:
        joined = gl.permute(joined, [0, 1, 2, 4, 3])
    return gl.convert_layout(gl.reshape(joined, [WARPS, 16, CODES.group]), W)


@jit
def load_rows(held, WARPS: tl.constexpr, VALUES: tl.constexpr, MMA: tl.constexpr):
    """Load the values of the rows of two tiles: VALUES tensors fp32 [WARPS, 16, 1], laid out like the sums.

    Unsigned bytes hold two values each: all low halves are returned first, then all high halves.
    """
    L: tl.constexpr = row_layout(WARPS, VALUES)
    given = held.load(L)
    if VALUES == 8:
        each = _eight(gl.reshape(given, [WARPS, 16, 2, 2, 2]))
    elif VALUES == 4:
        each = _four(gl.reshape(given, [WARPS, 16, 2, 2]))
    elif VALUES == 2:
        each = _two(given)
    else:
        each = (gl.reshape(given, [WARPS, 16]),)
    found, others = (), ()
    for j in tl.static_range(VALUES):
        value = gl.convert_layout(each[j], gl.SliceLayout(2, MMA))
        if value.dtype == tl.uint8:
            others += (gl.expand_dims((value >> 4).to(tl.float32), 2),)
            value = value & 15
        found += (gl.expand_dims(value.to(tl.float32), 2),)
    return found + others
