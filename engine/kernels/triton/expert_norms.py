"""The norms behind experts: of their sum, of the output beside it, and of both together, in one launch.

The plain twins are `Decoder._mix` and the layers of `models/reference/decoder.py`; every step rounds where they round.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,union-attr"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import weighed


@triton.jit
def _normed(x, weight, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Return RMSNorm of x, which is 0 from SIZE on, rounded to the dtype of the weight.

    NORM has the epsilon, and OFFSET and ONCE as in `weighed`.
    """
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + NORM[0])
    return weighed(wide, scale, weight, NORM[1], NORM[2])


@triton.jit
def join_kernel(
    found,
    beside,
    residual,
    out,
    found_weight,
    beside_weight,
    weight,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FOUND: tl.constexpr = None,
    BESIDE: tl.constexpr = None,
    NORM: tl.constexpr = None,
    SCALE: tl.constexpr = 1.0,
    PDL: tl.constexpr = False,
    factor=None,
):
    """Write out [T, SIZE] = (residual + SCALE * norm(norm(found) + norm(beside))) * factor, all [T, SIZE].

    FOUND, BESIDE and NORM say how the norms of found, beside and their sum compute (see `_normed`); those that are None
    change nothing. `beside`, `residual` and factor [1] may be None; `out` may be any of the inputs. Weights are [SIZE].
    The grid is [T], and BLOCK is SIZE rounded up to a power of two.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    gdc_launch_dependents(PDL)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    if FOUND is not None:
        first = tl.load(found_weight + columns, mask=inside, other=0.0)
    if BESIDE is not None:
        second = tl.load(beside_weight + columns, mask=inside, other=0.0)
    if NORM is not None:
        third = tl.load(weight + columns, mask=inside, other=0.0)
    gdc_wait(PDL)
    value = tl.load(found + at, mask=inside, other=0.0)
    other = tl.load(beside + at, mask=inside, other=0.0) if beside is not None else None
    before = tl.load(residual + at, mask=inside, other=0.0) if residual is not None else None
    if FOUND is not None:
        value = _normed(value, first, SIZE, FOUND)
    if beside is not None:
        if BESIDE is not None:
            other = _normed(other, second, SIZE, BESIDE)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
    if NORM is not None:
        value = _normed(value, third, SIZE, NORM)
    value = value.to(tl.float32)
    if SCALE != 1.0:
        value *= SCALE
    if residual is not None:
        value += before.to(tl.float32)
    value = value.to(dtype)
    if factor is not None:
        value = (value.to(tl.float32) * tl.load(factor).to(tl.float32)).to(dtype)
    tl.store(out + at, value, mask=inside)
