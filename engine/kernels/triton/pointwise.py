"""Device functions for single numbers, and for the columns of a head.

The plain twins: `activations.py`, `norms.py`, and `rotate` in `rope.py`, all in `models/reference/`.
Features that the flags turn off leave no code in a kernel.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from typing import NamedTuple

import triton
import triton.language as tl


class Gate(NamedTuple):
    """How one half of a product gates the other, as one constant (see `models.spec.FeedForward`)."""

    kind: str = "silu"
    gain: float = 1.0
    limit: float = 0.0
    """0: none."""
    up_offset: float = 0.0
    alone: bool = False
    """Whether it is the activation of a whole product, which gates nothing."""


@triton.jit
def activate(x, GATE: tl.constexpr):
    """Return the activation of a `Gate` in fp32, SiLU for None; x * sigmoid(gain * x) if the gain is not 1."""
    if GATE is None:
        result = x / (1.0 + tl.exp(-x))
    elif GATE.gain != 1.0:
        result = x / (1.0 + tl.exp(-GATE.gain * x))
    elif GATE.kind == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif GATE.kind == "gelu_tanh":
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif GATE.kind == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(GATE.kind == "relu" or GATE.kind == "relu2")
        result = tl.where(x < 0.0, 0.0, x)  # keeps NaN
        if GATE.kind == "relu2":
            result *= result
    return result


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """Return activation(gate) * up, both fp32. With a limit, gate is first capped at it and up is clamped to +-limit.
    `up_offset` is added to up. NaN stays NaN."""
    if GATE is not None:
        if GATE.limit != 0.0:
            gate = tl.where(gate > GATE.limit, GATE.limit, gate)
            up = tl.where(up > GATE.limit, GATE.limit, tl.where(up < -GATE.limit, -GATE.limit, up))
        if GATE.up_offset != 0.0:
            up += GATE.up_offset
    return activate(gate, GATE) * up


@triton.jit
def capped(x, CAP: tl.constexpr):
    """Return CAP * tanh(x / CAP) in fp32, or x if CAP is 0."""
    if CAP != 0.0:
        x = CAP - 2.0 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))
    return x


@triton.jit
def unit(x, scale, dtype: tl.constexpr, OFFSET: tl.constexpr, ONCE: tl.constexpr):
    """Return x * scale, both fp32, which a norm then weighs; rounded to `dtype` unless ONCE or with an OFFSET."""
    x *= scale
    if not ONCE and OFFSET == 0.0:
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def times(x, weight, OFFSET: tl.constexpr):
    """Return x * (weight + OFFSET), rounded to the dtype of the weight; x is fp32."""
    wide = weight.to(tl.float32)
    if OFFSET != 0.0:
        wide += OFFSET
    return (x * wide).to(weight.dtype)


@triton.jit
def weighed(x, scale, weight, OFFSET: tl.constexpr, ONCE: tl.constexpr):
    """Return the `unit` `times` the weight."""
    return times(unit(x, scale, weight.dtype, OFFSET, ONCE), weight, OFFSET)


@triton.jit
def partners(columns, ROTATED: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Return the column that each of a head's columns is rotated with; from ROTATED on, each is its own partner.

    With PAIRS, neighbours are rotated together, instead of the two halves.
    """
    if ROTATED == 0:
        others = columns
    elif PAIRS:
        others = columns ^ 1
    else:
        others = (columns + ROTATED // 2) % ROTATED
    if ROTATED > 0 and ROTATED < DIM:
        others = tl.where(columns < ROTATED, others, columns)
    return others


@triton.jit
def angles(rotary, columns, ROTATED: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Return cos and signed sin for each column of a head; `rotary` is a row of ROTATED numbers: cos beside sin."""
    at = columns // 2 if PAIRS else columns % (ROTATED // 2)
    if ROTATED == DIM and not PAIRS:
        cosine = tl.load(rotary + at).to(tl.float32)
        sine = tl.load(rotary + ROTATED // 2 + at).to(tl.float32)
    else:
        turns = columns < ROTATED
        cosine = tl.load(rotary + at, mask=turns, other=1.0).to(tl.float32)
        sine = tl.load(rotary + ROTATED // 2 + at, mask=turns, other=0.0).to(tl.float32)
    first = columns % 2 == 0 if PAIRS else columns < ROTATED // 2
    return cosine, tl.where(first, -sine, sine)


@triton.jit
def query_scale(position, BETA: tl.constexpr, ORIGINAL: tl.constexpr, dtype: tl.constexpr):
    """Return the factor of queries at a position (`QueryScaling`), in fp32 but rounded to `dtype`."""
    extensions = (position // ORIGINAL).to(tl.float32)
    return (1.0 + BETA * tl.log(1.0 + extensions)).to(dtype).to(tl.float32)


@triton.jit
def rotate(x, other, cosine, sine, dtype: tl.constexpr, EXACT: tl.constexpr = False):
    """Rotate x with its partner in the model's dtype; with EXACT in fp32, rounded once."""
    if EXACT:
        return (x * cosine + other * sine).to(dtype)
    return ((x * cosine).to(dtype).to(tl.float32) + (other * sine).to(dtype).to(tl.float32)).to(dtype)
