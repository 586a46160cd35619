"""Writes rows of the KV cache, encodes numbers as quantised rows, and decodes them.

The plain twin is `engine/cache/kv_rows.py`. ROW is the bytes of a quantised row, 0 if rows are plain; FP8 selects one
of the two kinds of quantised rows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

UP = tl.constexpr(2.0**120)
"""The bits of E4M3, placed in an fp32, are the number divided by this."""
DOWN = tl.constexpr(2.0**-120)
NEAREST = tl.constexpr(1.5 * 2.0**23)
"""Adding this to a small number rounds it to an integer, half to even."""
NUMBERS = 8192
"""About how many numbers a program reads."""


@triton.jit
def row_scale(most, FP8: tl.constexpr):
    """Return the scale, fp32, of numbers whose largest magnitude is `most`, and the factor that encodes them."""
    if FP8:
        exponent = (most.to(tl.int32, bitcast=True) >> 23) - 7
        scale = tl.where(exponent > 0, exponent << 23, 0).to(tl.float32, bitcast=True)
        inverse = tl.where(exponent > 0, (254 - exponent) << 23, 0).to(tl.float32, bitcast=True)
    else:
        there = most > 1e-30
        scale = tl.where(there, most * (1.0 / 127.0), 0.0)
        inverse = tl.where(there, tl.div_rn(most * 0.0 + 127.0, tl.where(there, most, 1.0)), 0.0)
    return scale, inverse


@triton.jit
def coded(x, inverse, FP8: tl.constexpr):
    """Return the codes of fp32 numbers: int32, 0 to 255."""
    x *= inverse
    if FP8:
        bits = (x * DOWN).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        codes = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) | ((bits >> 24) & 0x80)
    else:
        codes = (x + NEAREST).to(tl.int32, bitcast=True) & 0xFF
    return codes


@triton.jit
def decoded(codes, FP8: tl.constexpr):
    """Return the numbers of codes 0 to 255 without their scale, fp32."""
    wide = codes.to(tl.int32)
    if FP8:
        numbers = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * UP
    else:
        numbers = ((wide ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    return numbers


@triton.jit
def _write(
    source, rows, scales, slot, first, there,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Write one row of K or V from the heads at `source`."""
    head, column = tl.arange(0, PADDED), tl.arange(0, D)
    inside = there & (head < HEADS)[:, None] & (column < DIM)[None, :]
    at = head[:, None] * DIM + column[None, :]
    x = tl.load(source + first + at, inside, 0.0)
    if ROW == 0:
        tl.store(rows + slot * (HEADS * DIM) + at, x, inside)
    else:
        x = x.to(tl.float32)
        scale, inverse = row_scale(tl.max(tl.abs(x), 1), FP8)
        tl.store(rows + slot * ROW + at, coded(x, inverse[:, None], FP8).to(tl.uint8), inside)
        tl.store(scales + slot * (ROW // 4) + head, scale, there & (head < HEADS))


@triton.jit
def _write_kernel(
    k, v, cache_k, cache_v, slots, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
    k_scales=None, v_scales=None, ROW: tl.constexpr = 0, FP8: tl.constexpr = False,
):  # fmt: skip
    """Write K and V of a step's tokens into the cache, with one program per token.

    k and v [tokens, HEADS * DIM], K_STRIDE and V_STRIDE apart; cache_k and cache_v [slots, HEADS * DIM], or bytes
    [slots, ROW] with their k_scales and v_scales; slots [tokens]: where each token goes, -1 for padding, which is not
    written. PADDED and D are HEADS and DIM rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    _write(k, cache_k, k_scales, slot, token * K_STRIDE, slot >= 0, HEADS, DIM, PADDED, D, ROW, FP8)
    _write(v, cache_v, v_scales, slot, token * V_STRIDE, slot >= 0, HEADS, DIM, PADDED, D, ROW, FP8)


@triton.jit(do_not_specialize=["count"])
def _read_kernel(
    rows, scales, out, count, ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Decode ROWS rows of one head."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, column = tl.program_id(1), tl.arange(0, D)
    inside = (row < count)[:, None] & (column < DIM)[None, :]
    codes = tl.load(rows + row[:, None] * ROW + head * DIM + column[None, :], inside, 0)
    scale = tl.load(scales + row * (ROW // 4) + head, row < count, 0.0)
    numbers = decoded(codes, FP8) * scale[:, None]
    target = out + row[:, None] * (HEADS * DIM) + head * DIM + column[None, :]
    tl.store(target, numbers.to(out.dtype.element_ty), inside)


def write_rows(
    rows: tuple[Tensor, Tensor], told: dict[str, Any], slots: Tensor, k: Tensor, v: Tensor
) -> None:
    """Write K and V [n, heads, dim] to slots [n or more] of the cache's `rows`: those of K and those of V.

    Tokens with a negative slot are left out. `told` is the result of `KVCache.told`.
    """
    count, heads, dim = k.shape
    _write_kernel[(count,)](
        k,
        v,
        *rows,
        slots,
        **told,
        K_STRIDE=k.stride(0),
        V_STRIDE=v.stride(0),
        HEADS=heads,
        DIM=dim,
        PADDED=triton.next_power_of_2(heads),
        D=triton.next_power_of_2(dim),
        num_warps=4,
    )


def read_rows(rows: Tensor, scales: Tensor, out: Tensor, fp8: bool) -> Tensor:
    """Decode quantised rows [n, ROW], contiguous, with their scales, into `out` [n, heads, dim], and return it."""
    count, heads, dim = out.shape
    padded = triton.next_power_of_2(dim)
    each = max(NUMBERS // padded, 16)
    _read_kernel[(triton.cdiv(count, each), heads)](
        rows,
        scales,
        out,
        count,
        ROWS=each,
        HEADS=heads,
        DIM=dim,
        D=padded,
        ROW=rows.shape[1],
        FP8=fp8,
        num_warps=4,
    )
    return out
