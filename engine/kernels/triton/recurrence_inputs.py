"""What recurrences read of their rows: the convolution before them, SiLU and what follows for each row alone.

The plain twins are `causal_convolution.py`, `delta_net.py` and `mamba2.py` in `models/reference`. Everything is rounded
where these round. A row is computed by itself, so its bits do not depend on the other rows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.convolution_rows import NONE
from engine.kernels.triton.delta_rule import forget, sigmoid, softplus

_NONE = tl.constexpr(NONE)
_LENGTH_EPS = tl.constexpr(1e-6)
"""As in the reference."""


@triton.jit
def _number(rows, log, place, column, inside, STRIDE: tl.constexpr, FACTOR: tl.constexpr):
    """Load numbers of the rows at `place` (see `Walks`), fp32; those of the step's `rows` start at their column, and
    FACTOR multiplies them, rounded to their dtype."""
    own = tl.load(rows + (_NONE - 1 - place) * STRIDE + column, mask=inside & (place < _NONE), other=0.0)
    if FACTOR != 1.0:
        own = (own.to(tl.float32) * FACTOR).to(own.dtype)
    earlier = tl.load(log + column, mask=inside & (place >= 0), other=0.0)
    return tl.where(place >= 0, earlier.to(tl.float32), own.to(tl.float32))


@triton.jit
def _keep(number, log, slots, place, column, inside, SIZE: tl.constexpr):
    """Write numbers of the step's rows into the log."""
    own = inside & (place < _NONE)
    slot = tl.load(slots + (_NONE - 1 - place), mask=place < _NONE, other=0).to(tl.int64)
    tl.store(log + slot * SIZE + column, number.to(log.dtype.element_ty), mask=own)


@triton.jit
def _convolved(
    given, filters, bias, column, real, row, there, STRIDE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    FACTOR: tl.constexpr = 1.0,
):  # fmt: skip
    """Convolve columns [1, n] of rows [m, 1] and apply SiLU, rounded to the dtype of the rows: fp32 [m, n]. FACTOR
    multiplies the step's own first.

    `given` is rows, log, places and slots; `real` and `there` say which columns and rows there are. The step's own are
    written into the log.
    """
    rows, log, places, slots = given
    total = tl.zeros([row.shape[0], column.shape[1]], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        place = tl.load(places + row * WIDTH + tap, mask=there, other=_NONE).to(tl.int64)
        weight = tl.load(filters + column * WIDTH + tap, mask=real, other=0.0).to(tl.float32)
        number = _number(rows, log + place * SIZE, place, column, there & real, STRIDE, FACTOR)
        total += weight * number
        if tap == WIDTH - 1:
            _keep(number, log, slots, place, column, there & real, SIZE)
    total = total.to(rows.dtype.element_ty).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(rows.dtype.element_ty).to(tl.float32)


@triton.jit
def _gate(
    given, gates, first, number, row, there, GATES: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    FACTOR: tl.constexpr = 1.0,
):  # fmt: skip
    """Load a gate of rows [m, 1], fp32, and write the step's own into the log, where the gates begin at column `first`.

    gates [T, GATES] are the step's.
    """
    _, log, places, slots = given
    place = tl.load(places + row * WIDTH + WIDTH - 1, mask=there, other=_NONE).to(tl.int64)
    found = _number(gates, log + place * SIZE + first, place, number, there, GATES, FACTOR)
    _keep(found, log, slots, place, first + number, there, SIZE)
    return found


@triton.constexpr_function
def _halvings(size):
    """Return how often a power of two can be halved."""
    return size.bit_length() - 1


@triton.jit
def _halved(x):
    """Sum x [m, n], n being a power of two, by adding one half to the other again and again: [m, 1]."""
    for _ in tl.static_range(_halvings(x.shape[1])):
        x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return x


@triton.jit
def _unit(x):
    """Divide heads x [rows, keys] by their lengths, with the sums of `unit_length` in the order of a program of it."""
    ROWS: tl.constexpr = x.shape[0]
    KEYS: tl.constexpr = x.shape[1]
    SOME: tl.constexpr = min(KEYS, 32)
    warps = _halved(tl.reshape(x * x, [ROWS * (KEYS // SOME), SOME]))
    return x * tl.rsqrt(_halved(tl.reshape(warps, [ROWS, KEYS // SOME])) + _LENGTH_EPS)


@triton.jit(do_not_specialize=["count"])
def delta_inputs_kernel(
    rows, gates, log, places, slots, filters, dt_bias, rates, queries, keys, values, factors, betas, count,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, GATES: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Make what `walk_kernel` reads of `count` rows. The grid is [cdiv(count, LINES), KEY_HEADS + HEADS].

    rows [T, STRIDE] begin with q, k and v, gates [T, GATES] with b and a, which side by side are the SIZE numbers of a
    row of log [slots, SIZE]. places int32 [count, WIDTH] and slots int32 [T] are those of `engine.kernels.walks.Walks`.
    filters [q, k and v, WIDTH]; dt_bias and rates, which are less than 0, fp32 [HEADS]. queries and keys fp32
    [count, KEY_HEADS, KEYS] are K ** -0.5 and 1 long; values [count, HEADS, V] in the dtype
    of the rows; factors, by which states decay, and betas fp32 [count, HEADS].
    KEYS and VALUES are K and V rounded up to powers of two.
    """
    row = (tl.program_id(0) * LINES + tl.arange(0, LINES))[:, None].to(tl.int64)
    head = tl.program_id(1)
    there = row < count
    given = rows, log, places, slots
    if head < KEY_HEADS:
        key = tl.arange(0, KEYS)[None, :]
        real = key < K
        column = head * K + key
        q = _convolved(given, filters, None, column, real, row, there, STRIDE, SIZE, WIDTH)
        k = _convolved(given, filters, None, KEY_HEADS * K + column, real, row, there, STRIDE, SIZE, WIDTH)
        own = (row * KEY_HEADS + head) * KEYS + key
        tl.store(queries + own, _unit(q) * (K**-0.5), mask=there)
        tl.store(keys + own, _unit(k), mask=there)
    else:
        value_head = head - KEY_HEADS
        number = tl.arange(0, VALUES)[None, :]
        inside = number < V
        channel = 2 * KEY_HEADS * K + value_head * V + number
        v = _convolved(given, filters, None, channel, inside, row, there, STRIDE, SIZE, WIDTH)
        tl.store(
            values + (row * HEADS + value_head) * V + number,
            v.to(values.dtype.element_ty),
            mask=there & inside,
        )
        first = 2 * KEY_HEADS * K + HEADS * V
        b = _gate(given, gates, first, value_head, row, there, GATES, SIZE, WIDTH)
        a = _gate(given, gates, first, HEADS + value_head, row, there, GATES, SIZE, WIDTH)
        beta = sigmoid(b, rows.dtype.element_ty)
        factor = forget(a, tl.load(dt_bias + value_head), tl.load(rates + value_head))
        tl.store(betas + row * HEADS + value_head, beta, mask=there)
        tl.store(factors + row * HEADS + value_head, factor, mask=there)


@triton.jit(do_not_specialize=["count"])
def mamba_inputs_kernel(
    rows, gates, log, places, slots, filters, bias, dt_bias, rates, queries, keys, values, factors, steps, count,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, GATES: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, X: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Make what `walk_kernel` reads of `count` rows. The grid is [cdiv(count, LINES), GROUPS + HEADS].

    rows begin with x, B and C, gates with dt; bias [x, B and C] or None. queries and keys fp32 [count, GROUPS, KEYS]
    are C and B; steps fp32 [count, HEADS] are t, from LEAST to MOST. X, B, C and DT multiply the step's numbers. All
    else is as in `delta_inputs_kernel`.
    """
    row = (tl.program_id(0) * LINES + tl.arange(0, LINES))[:, None].to(tl.int64)
    head = tl.program_id(1)
    there = row < count
    given = rows, log, places, slots
    if head < GROUPS:
        key = tl.arange(0, KEYS)[None, :]
        real = key < K
        column = HEADS * V + head * K + key
        b = _convolved(given, filters, bias, column, real, row, there, STRIDE, SIZE, WIDTH, B)
        column += GROUPS * K
        c = _convolved(given, filters, bias, column, real, row, there, STRIDE, SIZE, WIDTH, C)
        own = (row * GROUPS + head) * KEYS + key
        tl.store(queries + own, c, mask=there)
        tl.store(keys + own, b, mask=there)
    else:
        value_head = head - GROUPS
        number = tl.arange(0, VALUES)[None, :]
        inside = number < V
        channel = value_head * V + number
        x = _convolved(given, filters, bias, channel, inside, row, there, STRIDE, SIZE, WIDTH, X)
        tl.store(
            values + (row * HEADS + value_head) * V + number,
            x.to(values.dtype.element_ty),
            mask=there & inside,
        )
        first = HEADS * V + 2 * GROUPS * K
        dt = _gate(given, gates, first, value_head, row, there, GATES, SIZE, WIDTH, DT)
        step = tl.minimum(tl.maximum(softplus(dt + tl.load(dt_bias + value_head)), LEAST), MOST)
        tl.store(steps + row * HEADS + value_head, step, mask=there)
        tl.store(factors + row * HEADS + value_head, tl.exp(step * tl.load(rates + value_head)), mask=there)
