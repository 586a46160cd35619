"""Device functions that norm heads, each by itself.

The plain twin is `models/reference/norms.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import triton
import triton.language as tl

from engine.kernels.triton.pointwise import weighed


@triton.jit
def norm_heads(
    x,
    mean_of,
    weight,
    DIM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr = 0.0,
    ONCE: tl.constexpr = False,
):
    """Apply RMSNorm to heads of DIM numbers by the mean square of `mean_of`; `weighed` defines the rounding."""
    scale = tl.rsqrt(tl.sum(mean_of * mean_of, 1, keep_dims=True) / DIM + EPS)
    return weighed(x, scale, weight, OFFSET, ONCE).to(tl.float32)


@triton.jit
def unit_heads(x, DIM: tl.constexpr, EPS: tl.constexpr):
    """Apply RMSNorm without a weight to heads of DIM numbers, rounded to their dtype."""
    wide = x.to(tl.float32)
    return (wide * tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / DIM + EPS)).to(x.dtype)
