"""The norm and the gate after gated delta nets of prompts.

The plain twin is `gated_norm` in `models/reference/delta_net.py`. Everything is rounded where it rounds.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.pointwise import activate, weighed


@triton.jit(do_not_specialize=["count"])
def gated_norm_kernel(
    y, z, weight, out, count,
    HEADS: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, STRIDE: tl.constexpr, EPS: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Norm each head of y [count, HEADS, V] with weight [V], and gate it with SiLU of z [count, STRIDE]: out, like y.

    VALUES is V rounded up to a power of two. The grid is [cdiv(count, LINES), HEADS].
    """
    row = (tl.program_id(0) * LINES + tl.arange(0, LINES))[:, None].to(tl.int64)
    column = tl.arange(0, VALUES)[None, :]
    inside = (row < count) & (column < V)
    at = tl.program_id(1) * V + column
    numbers = tl.load(y + row * (HEADS * V) + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / V + EPS)[:, None]
    normed = weighed(numbers, scale, tl.load(weight + column, mask=column < V, other=0.0), 0.0, False)
    gate = activate(tl.load(z + row * STRIDE + at, mask=inside, other=0.0).to(tl.float32), None)
    tl.store(
        out + row * (HEADS * V) + at, (normed.to(tl.float32) * gate).to(out.dtype.element_ty), mask=inside
    )
