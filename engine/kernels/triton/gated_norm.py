"""The norm and the gate after recurrences.

The plain twins are `gated_norm` in `models/reference/delta_net.py` and in `mamba2.py` beside it. Everything is rounded
where these round.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,union-attr"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import activate, weighed


@triton.jit(do_not_specialize=["count"])
def gated_norm_kernel(
    y, z, weight, out, count,
    HEADS: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, STRIDE: tl.constexpr, EPS: tl.constexpr,
    LINES: tl.constexpr, DELTA: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr = False,
    FACTOR: tl.constexpr = 1.0,
):  # fmt: skip
    """Norm each head of y [count, HEADS, V] and gate it with SiLU of FACTOR * z [count, STRIDE]: out [count, HEADS, V].

    With DELTA all heads have one weight [V], and what is normed is rounded; otherwise weight is [HEADS, V], or None
    without a norm. FIRST says that y is normed before it is gated. VALUES is V rounded up to a power of two. The grid
    is [cdiv(count, LINES), HEADS].
    """
    gdc_launch_dependents(PDL)
    row = (tl.program_id(0) * LINES + tl.arange(0, LINES))[:, None].to(tl.int64)
    column = tl.arange(0, VALUES)[None, :]
    real = column < V
    inside = (row < count) & real
    at = tl.program_id(1) * V + column
    scales = None
    if weight is not None:
        scales = tl.load(weight + (column if DELTA else at), mask=real, other=0.0)
    gdc_wait(PDL)
    found = tl.load(y + row * (HEADS * V) + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row * STRIDE + at, mask=inside, other=0.0)
    if FACTOR != 1.0:
        gate = (gate.to(tl.float32) * FACTOR).to(gate.dtype)
    gate = activate(gate.to(tl.float32), None)
    if not FIRST:
        found *= gate
    if weight is not None:
        scale = tl.rsqrt(tl.sum(found * found, 1) / V + EPS)[:, None]
        if DELTA:
            found = weighed(found, scale, scales, 0.0, False).to(tl.float32)
        else:
            found = found * scale * scales.to(tl.float32)
    if FIRST:
        found *= gate
    tl.store(out + row * (HEADS * V) + at, found.to(out.dtype.element_ty), mask=inside)
