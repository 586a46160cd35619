"""Recurrences of a decode step, between the products around them.

The plain twins are `delta_net.py` and `mamba2.py` in `models/reference`, and `engine/attention/recurring.py`; what is
C, B and x in Mamba-2 is q, k and v here. A program has one head of one sequence, or in Mamba-2 some values of it, which
depend on no others. It loads the state before it waits for
the products, goes on over the rows of the log since that state, then over the sequence's rows of the step: usually one,
more where guesses are checked. The state is written after the first of these alone, because guesses after it may be
wrong; if they are right, the next step reads their rows in the log.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,untyped-decorator,assignment,var-annotated"
# mypy: disable-error-code="has-type"
from typing import NamedTuple

import triton.language as tl

from engine.kernels.triton.delta_rule import (
    advance,
    convolved,
    forget,
    read_out,
    sigmoid,
    softplus,
    state_layout,
    unit_length,
)
from engine.kernels.triton.gluon import gl, jit
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import weighed
from engine.kernels.triton.recurrence_rows import add


class Recurring(NamedTuple):
    """The sizes of a recurrence, as one constant."""

    key_heads: int
    heads: int
    keys: int
    values: int
    width: int
    """Rows that the convolution sees."""
    is_delta: bool
    """Whether it is a gated delta net, otherwise Mamba-2."""
    alternating: bool = False
    eps: float = 0.0
    """The epsilon of the norm of each value head; Mamba-2 has none here."""
    least: float = 0.0
    """The limits of the steps of Mamba-2."""
    most: float = float("inf")
    gates: bool = True
    """Whether the output is multiplied by silu(z)."""
    z_factor: float = 1.0
    """Multiplies z where it is projected."""
    q_factor: float = 1.0
    k_factor: float = 1.0
    v_factor: float = 1.0
    dt_factor: float = 1.0


@jit
def _place(table, row, BLOCK: tl.constexpr):
    """Return the slot of a row in the log; any slot for a row before the first."""
    block = gl.load(table + row // BLOCK, mask=row >= 0, other=0).to(tl.int64)
    return block * BLOCK + row % BLOCK


@jit
def _load(at, real):
    """Load numbers, zeros where they are not real; `real` is None if all are."""
    if real is None:  # noqa: SIM108 - this is known when the kernel is compiled
        found = gl.load(at)
    else:
        found = gl.load(at, mask=real, other=0.0)
    return found


@jit
def _taps(filters, channel, real, WIDTH: tl.constexpr):
    """Load the filters of channels, by tap."""
    found = ()
    for tap in tl.static_range(WIDTH):
        found += (_load(filters + channel * WIDTH + tap, real),)
    return found


@jit
def _inputs(log, table, first, channel, real, BLOCK: tl.constexpr, LOG: tl.constexpr, WIDTH: tl.constexpr):
    """Load what the WIDTH - 1 rows before row `first` gave to channels; zeros before the first row of all."""
    found = ()
    for tap in tl.static_range(WIDTH - 1):
        row = first - (WIDTH - 1) + tap
        there = (channel >= 0) & (row >= 0)
        if real is not None:
            there = there & real
        found += (gl.load(log + _place(table, row, BLOCK) * LOG + channel, mask=there, other=0.0),)
    return found


@jit
def _multiplied(x, FACTOR: tl.constexpr):
    """Return x * FACTOR, rounded to the dtype of x."""
    if FACTOR != 1.0:
        x = (x.to(tl.float32) * FACTOR).to(x.dtype)
    return x


@jit
def _shifted(earlier, new):
    """Return `earlier` without the oldest input and with the new one."""
    return earlier[1:] + (new,)  # noqa: RUF005 - kernels cannot unpack


@jit(do_not_specialize=["table_stride"])
def recur_kernel(
    projected,
    gates,
    filters,
    conv_bias,
    dt_bias,
    decay,
    skip,
    norm_weight,
    log,
    states,
    active,
    tables,
    counters,
    moves,
    out,
    table_stride,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute what the output projection reads, [rows, heads, values]: norm(y) * silu(z) of a delta net, y * silu(z) of
    Mamba-2, or y alone. The grid is [heads * cdiv(values, PART), rows].

    projected [rows, q, k, v and z] and gates [rows, b and a] are the products of a delta net; those of Mamba-2 are
    [rows, z, v, k, q and dt] and None. filters [channels, width]; conv_bias [channels] or None; dt_bias, decay and skip
    fp32 [heads], the last for Mamba-2 alone; norm_weight [values] for a delta net. log [slots, channels and gates] is
    the layer's part of the cache, and receives the rows of the step. states fp32 [slots, heads, keys, values], of
    Mamba-2 [slots, heads, values, keys]. active, tables, counters and moves are those of a `StepInput`. Rows of one
    sequence are adjacent; of these, `moves` counts them in the first, and in the others there are none. SIZES is a
    `Recurring`. A program has PART values, a power of two; of a delta net it has all of a head. WARPS is
    PART // `warp_values`.
    """
    gdc_launch_dependents(PDL)
    PARTS: tl.constexpr = (SIZES.values + PART - 1) // PART
    head = gl.program_id(0) // PARTS
    begin = gl.program_id(0) % PARTS * PART
    batch = gl.program_id(1)
    slot = gl.load(active + batch).to(tl.int64)
    count = gl.load(moves + 4 * slot + 3, mask=slot >= 0, other=0)
    if count == 0:
        gdc_wait(PDL)
        return
    dtype: tl.constexpr = projected.dtype.element_ty
    DELTA: tl.constexpr = SIZES.is_delta
    HEADS: tl.constexpr = SIZES.heads
    KEYS: tl.constexpr = SIZES.keys
    VALUES: tl.constexpr = SIZES.values
    WIDTH: tl.constexpr = SIZES.width
    LINE: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    STATE: tl.constexpr = state_layout(KEYS, WARPS, DELTA)
    KEY: tl.constexpr = gl.SliceLayout(1, STATE)
    VALUE: tl.constexpr = gl.SliceLayout(0, STATE)
    KEY_SIZE: tl.constexpr = SIZES.key_heads * KEYS
    SIZE: tl.constexpr = HEADS * VALUES
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + SIZE
    GATES: tl.constexpr = 2 * HEADS if DELTA else HEADS
    LOG: tl.constexpr = CHANNELS + GATES
    PROJECTED: tl.constexpr = CHANNELS + SIZE + (0 if DELTA else HEADS)
    FIRST: tl.constexpr = 0 if DELTA else SIZE  # where in a projected row the channels begin, and z
    Z: tl.constexpr = CHANNELS if DELTA else 0
    EACH: tl.constexpr = HEADS // SIZES.key_heads
    source = gl.load(moves + 4 * slot)
    target = gl.load(moves + 4 * slot + 1)
    start = gl.load(counters + 2 * slot).to(tl.int32)
    first = start - gl.load(moves + 4 * slot + 2)
    table = tables + slot * table_stride

    key_row = gl.expand_dims(gl.arange(0, KEYS, layout=KEY), 1)
    column = begin + gl.arange(0, PART, layout=VALUE)
    value = gl.expand_dims(column, 0)
    number = begin + gl.arange(0, PART, layout=LINE)
    v_real = None
    if VALUES % PART != 0:
        v_real = number < VALUES
    within = head * KEYS * VALUES + (key_row * VALUES + value if DELTA else value * KEYS + key_row)
    is_state = within >= 0
    is_value = column >= 0
    if VALUES % PART != 0:
        is_state = is_state & (value < VALUES)
        is_value = column < VALUES
    at_source = states + source.to(tl.int64) * (SIZE * KEYS) + within
    state = gl.load(at_source, mask=is_state & (source >= 0), other=0.0)

    key_head = head % SIZES.key_heads if SIZES.alternating else head // EACH
    is_first = head < SIZES.key_heads if SIZES.alternating else head % EACH == 0
    is_first = is_first & (begin == 0)
    key_at = key_head * KEYS + gl.arange(0, KEYS, layout=LINE)
    q_at = key_at if DELTA else SIZE + KEY_SIZE + key_at
    k_at = (KEY_SIZE if DELTA else SIZE) + key_at
    v_at = (2 * KEY_SIZE if DELTA else 0) + head * VALUES + number
    q_filters = _taps(filters, q_at, None, WIDTH)
    k_filters = _taps(filters, k_at, None, WIDTH)
    v_filters = _taps(filters, v_at, v_real, WIDTH)
    q_bias, k_bias, v_bias = None, None, None
    if conv_bias is not None:
        q_bias, k_bias, v_bias = (
            gl.load(conv_bias + q_at),
            gl.load(conv_bias + k_at),
            _load(conv_bias + v_at, v_real),
        )
    q_before = _inputs(log, table, first, q_at, None, BLOCK, LOG, WIDTH)
    k_before = _inputs(log, table, first, k_at, None, BLOCK, LOG, WIDTH)
    v_before = _inputs(log, table, first, v_at, v_real, BLOCK, LOG, WIDTH)
    own_bias = gl.load(dt_bias + head)
    own_decay = gl.load(decay + head)
    if DELTA:
        weight = gl.load(norm_weight + column, mask=is_value, other=0.0)
    else:
        direct = gl.load(skip + head)
    gdc_wait(PDL)

    for row in range(first, start + count):
        is_own = row >= start
        at = tl.maximum(row - start, 0)
        own_table = table + at.to(tl.int64) * table_stride  # of a guess, which has blocks up to its own row
        kept = log + _place(own_table, row, BLOCK) * LOG
        given = projected + (batch + at).to(tl.int64) * PROJECTED
        line = kept
        pair = kept + CHANNELS
        if is_own:
            line = given + FIRST
            pair = given + FIRST + CHANNELS if gates is None else gates + (batch + at).to(tl.int64) * GATES
        q_new = gl.load(line + q_at)
        k_new = gl.load(line + k_at)
        v_new = _load(line + v_at, v_real)
        a = gl.load(pair + GATES - HEADS + head)  # dt of Mamba-2
        z = gl.load(given + Z + head * VALUES + column, mask=is_value & is_own, other=0.0)
        z = _multiplied(z, SIZES.z_factor).to(tl.float32)
        if DELTA:
            b = gl.load(pair + head)
        if is_own:
            q_new = _multiplied(q_new, SIZES.q_factor)
            k_new = _multiplied(k_new, SIZES.k_factor)
            v_new = _multiplied(v_new, SIZES.v_factor)
            a = _multiplied(a, SIZES.dt_factor)
            gl.store(kept + q_at, q_new, mask=(q_at >= 0) & is_first)
            gl.store(kept + k_at, k_new, mask=(k_at >= 0) & is_first)
            gl.store(kept + v_at, v_new, mask=v_real)
            gl.store(kept + LOG - HEADS + head, a)
            if DELTA:
                gl.store(kept + CHANNELS + head, b)
        q = convolved(q_before, q_new, q_filters, dtype, q_bias)
        k = convolved(k_before, k_new, k_filters, dtype, k_bias)
        v = convolved(v_before, v_new, v_filters, dtype, v_bias)
        q_before = _shifted(q_before, q_new)
        k_before = _shifted(k_before, k_new)
        v_before = _shifted(v_before, v_new)
        if DELTA:
            q = unit_length(q) * KEYS**-0.5
            k = unit_length(k)
        q = gl.convert_layout(q, KEY)
        k = gl.convert_layout(k, KEY)
        v = gl.convert_layout(v, VALUE)
        if DELTA:
            state = advance(state, k, v, sigmoid(b, dtype), forget(a.to(tl.float32), own_bias, own_decay))
        else:
            step = tl.minimum(tl.maximum(softplus(a.to(tl.float32) + own_bias), SIZES.least), SIZES.most)
            state = add(state, k, v, step, tl.exp(step * own_decay))
        if (row == start) & (target >= 0):
            gl.store(states + target.to(tl.int64) * (SIZE * KEYS) + within, state, mask=is_state)
        if is_own:
            y = read_out(state, q)
            if DELTA:
                y = y.to(dtype).to(tl.float32)
                scale = gl.rsqrt(gl.sum(y * y, 0) / VALUES + SIZES.eps)
                y = weighed(y, scale, weight, 0.0, False).to(tl.float32)
            else:
                y = y + direct * v
            if SIZES.gates:
                y = y * (z / (1.0 + gl.exp(-z)))
            place = out + (batch + at).to(tl.int64) * SIZE + head * VALUES + column
            gl.store(place, y.to(out.dtype.element_ty), mask=is_value)
