"""Expands weights in planes (`models/weights/packing.py`), for prompts and embeddings.

The plain twin is `unpack` in `models/weights/packing.py`: it gives the same numbers in fp32, rounded once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
from typing import NamedTuple

import triton
import triton.language as tl

from models.weights.formats.blocks import IQ4

IQ4_LOW, IQ4_HIGH = (
    tl.constexpr(int.from_bytes(bytes(number & 255 for number in part), "little", signed=True))
    for part in (IQ4[:8], IQ4[8:])
)
"""The numbers of the codes of IQ4_NL, eight bits each."""


class Codes(NamedTuple):
    """What kernels know of a format in planes, as one constant (see `models.weights.formats.blocks.BlockFormat`)."""

    bits: int
    more: int
    """Bits of the codes in the second plane; 0: there is only one."""
    less: int
    group: int
    shared: int
    values: int
    supers: bool
    floats: int


@triton.jit
def planes_at(codes, more, scales, supers, number, N: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr):
    """Return the planes of matrix `number` among matrices [N, K] stored one after the other, N a multiple of eight."""
    ACROSS: tl.constexpr = (K + 127) // 128
    tile = number.to(tl.int64) * (N // 8)
    codes, scales = codes + tile * (ACROSS * 32 * CODES.bits), scales + tile * (ACROSS * 8 * CODES.values)
    if CODES.more > 0:
        more += tile * (ACROSS * 32 * CODES.more)
    if CODES.supers:
        supers += tile * (ACROSS // 2 * 16)
    return codes, more, scales, supers


@triton.jit
def _meant(code, BITS: tl.constexpr, LESS: tl.constexpr, FLOATS: tl.constexpr):
    """Return the numbers of codes before they are scaled, fp32."""
    if FLOATS == 3:
        number = ((code & 128) << 24 | (code & 127) << 20).to(tl.float32, bitcast=True) * 2.0**120
    elif FLOATS == 2:
        eight = tl.where(code < 8, IQ4_LOW, IQ4_HIGH) >> ((code & 7) * 8).to(tl.int64)
        number = _number((eight & 255).to(tl.int32) ^ 128, 128)
    elif FLOATS == 1:
        # A sign, two exponent bits and one fraction bit, moved to their places in an fp32.
        number = ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 2.0**127
    elif BITS == 8:  # signed
        number = _number(code ^ 128, 128)
    else:
        number = _number(code, LESS)
    return number


@triton.jit
def _scale_and_minimum(scales, at, SCALES: tl.constexpr, VALUES: tl.constexpr):
    """Return the scale at a place, and its minimum if there is one, in fp32."""
    scale = tl.load(scales + at)
    low = scale
    if scales.dtype.element_ty == tl.uint8:
        scale, low = scale & 15, scale >> 4
    elif VALUES > SCALES:
        low = tl.load(scales + at + SCALES)
    return scale.to(tl.float32), low.to(tl.float32)


@triton.jit
def _number(code, LESS: tl.constexpr):
    """Return code - LESS, for a code from 0 to 255. Putting it behind the bits of 2 ** 23 beats a conversion."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)


@triton.jit
def tile_numbers(
    codes, more, scales, supers, row, first, DEPTH: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr
):
    """Return the numbers of rows int32 [n] in DEPTH columns from `first` on, fp32 [n, DEPTH], reading word by word.

    DEPTH is a multiple of the group and divides 128; `first` is a multiple of DEPTH. Beyond the last column there are
    zeros.
    """
    ACROSS: tl.constexpr = (K + 127) // 128
    EACH: tl.constexpr = CODES.group // 4
    CHUNKS: tl.constexpr = 128 // CODES.group
    UNIT: tl.constexpr = min(EACH, 32 // CODES.bits)
    GROUPS: tl.constexpr = DEPTH // CODES.group
    tile = (row // 8 * ACROSS + first // 128)[:, None]
    column = first % 128 + tl.arange(0, DEPTH // UNIT)[None, :] * UNIT
    lane, place = (
        row[:, None] % 8 * 4 + column % CODES.group // EACH,
        column // CODES.group * EACH + column % EACH,
    )
    number = tl.arange(0, UNIT)[None, None, :]
    code = _code(codes, tile, lane, place, number, CODES.bits)
    if CODES.more > 0:
        code |= _code(more, tile, lane, place, number, CODES.more) << CODES.bits
    found = tl.reshape(
        _meant(code, CODES.bits, CODES.less, CODES.floats), [row.shape[0], GROUPS, CODES.group]
    )
    SCALES: tl.constexpr = CHUNKS // CODES.shared
    chunk = (first % 128 // CODES.group + tl.arange(0, GROUPS)[None, :]) // CODES.shared
    at = tile * (8 * CODES.values) + row[:, None] % 8 * CODES.values + chunk
    scale, low = _scale_and_minimum(scales, at, SCALES, CODES.values)
    common = supers + ((row // 8 * (ACROSS // 2) + first // 256) * 8 + row % 8)[:, None] * 2
    if CODES.supers:
        scale *= tl.load(common).to(tl.float32)
    found *= scale[:, :, None]
    if CODES.values > SCALES or scales.dtype.element_ty == tl.uint8:
        if CODES.supers:
            found -= (low * tl.load(common + 1).to(tl.float32))[:, :, None]
        else:
            found += low[:, :, None]
    return tl.reshape(found, [row.shape[0], DEPTH])


@triton.jit
def _code(codes, tile, lane, place, number, BITS: tl.constexpr):
    """Return the codes at places [rows, n] of the threads `lane` of a tile, in one plane, and the next ones by `number`
    [1, 1, UNIT], all in one word."""
    PER: tl.constexpr = 32 // BITS
    word = place // PER
    # The words of a thread are stored 16 bytes at a time.
    at = word // 4 * 128 + lane * 4 + word % 4 if BITS == 8 else lane * BITS + word
    shift = (place % PER // 2 * BITS)[:, :, None] + (number // 2 * BITS + number % 2 * 16)
    return tl.load(codes + (tile * (32 * BITS) + at))[:, :, None] >> shift & ((1 << BITS) - 1)


@triton.jit
def _expand(codes, more, scales, supers, out, row, line, there, K: tl.constexpr, CODES: tl.constexpr):
    """Write 128 columns of rows int32 [n] of a matrix to the lines of `out` that are `there`."""
    first = tl.program_id(0) * 128
    column = first + tl.arange(0, 128)
    value = tile_numbers(codes, more, scales, supers, row, first, 128, K, CODES)
    at, there = out + line.to(tl.int64)[:, None] * K + column[None, :], there[:, None]
    if K % 128 != 0:
        there &= (column < K)[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["start"])
def unpack_kernel(
    codes, more, scales, supers, out, start, N: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr,
    HEIGHT: tl.constexpr,
):  # fmt: skip
    """Write out [N, K] = the rows from `start` on of a matrix in planes. The grid is [tiles of K, cdiv(N, HEIGHT)]."""
    line = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    row = start + tl.minimum(line, N - 1)
    _expand(codes, more, scales, supers, out, row, line, line < N, K, CODES)


@triton.jit(do_not_specialize=["count"])
def packed_rows_kernel(
    ids, codes, more, scales, supers, out, count, K: tl.constexpr, CODES: tl.constexpr, HEIGHT: tl.constexpr
):
    """Write out [count, K] = the rows ids, int64 [count]. The grid is [tiles of K, cdiv(count, HEIGHT)]."""
    line = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    row = tl.load(ids + line, mask=line < count, other=0).to(tl.int32)
    _expand(codes, more, scales, supers, out, row, line, line < count, K, CODES)
