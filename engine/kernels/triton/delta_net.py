"""Gated delta nets of a decode step, between the products around them.

The plain twins are `models/reference/delta_net.py` and `engine/attention/recurring.py`; everything is rounded where
these round. A program has one value head of one sequence. It loads the state before it waits for the products, goes on
over the rows of the log since that state, then over the sequence's rows of the step: usually one, more where guesses
are checked. The state is written after the first of these alone, because guesses after it may be wrong; if they are
right, the next step reads their rows in the log.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,untyped-decorator,assignment,var-annotated"
import triton.language as tl

from engine.kernels.triton.delta_rule import (
    advance,
    convolved,
    forget,
    read_out,
    sigmoid,
    state_layout,
    unit_length,
)
from engine.kernels.triton.gluon import gl, jit
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.pointwise import weighed


@jit
def _place(table, row, BLOCK: tl.constexpr):
    """Return the slot of a row in the log; any slot for a row before the first."""
    block = gl.load(table + row // BLOCK, mask=row >= 0, other=0).to(tl.int64)
    return block * BLOCK + row % BLOCK


@jit
def _taps(filters, channel, WIDTH: tl.constexpr):
    """Load the filters of channels, by tap."""
    found = ()
    for tap in tl.static_range(WIDTH):
        found += (gl.load(filters + channel * WIDTH + tap),)
    return found


@jit
def _inputs(log, table, first, channel, BLOCK: tl.constexpr, LOG: tl.constexpr, WIDTH: tl.constexpr):
    """Load what the WIDTH - 1 rows before row `first` gave to channels; zeros before the first row of all."""
    found = ()
    for tap in tl.static_range(WIDTH - 1):
        row = first - (WIDTH - 1) + tap
        there = (channel >= 0) & (row >= 0)
        found += (gl.load(log + _place(table, row, BLOCK) * LOG + channel, mask=there, other=0.0),)
    return found


@jit
def _shifted(earlier, new):
    """Return `earlier` without the oldest input and with the new one."""
    return earlier[1:] + (new,)  # noqa: RUF005 - kernels cannot unpack


@jit(do_not_specialize=["table_stride"])
def delta_net_kernel(
    projected,
    gates,
    filters,
    dt_bias,
    decay,
    norm_weight,
    log,
    states,
    active,
    tables,
    counters,
    moves,
    out,
    table_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    ALTERNATING: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute norm(y) * silu(z) of every value head: out [rows, VALUE_HEADS, VALUES]. The grid is [VALUE_HEADS, rows].

    projected [rows, q, k, v and z] and gates [rows, b and a] are the products; filters [channels, WIDTH], dt_bias and
    decay fp32 [VALUE_HEADS] and norm_weight [VALUES] are those of the layer. log [slots, q, k, v, b and a] is its part
    of the cache, and receives the rows of the step. states fp32 [slots, VALUE_HEADS, KEYS, VALUES]. active, tables,
    counters and moves are those of a `StepInput`. Rows of one sequence are adjacent; of these, `moves` counts them in
    the first, and in the others there are none. SCALE multiplies q. WARPS is VALUES // 16.
    """
    gdc_launch_dependents(PDL)
    head = gl.program_id(0)
    batch = gl.program_id(1)
    slot = gl.load(active + batch).to(tl.int64)
    count = gl.load(moves + 4 * slot + 3, mask=slot >= 0, other=0)
    if count == 0:
        gdc_wait(PDL)
        return
    dtype: tl.constexpr = projected.dtype.element_ty
    LINE: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    STATE: tl.constexpr = state_layout(KEYS, WARPS)
    KEY: tl.constexpr = gl.SliceLayout(1, STATE)
    VALUE: tl.constexpr = gl.SliceLayout(0, STATE)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
    LOG: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    PROJECTED: tl.constexpr = CHANNELS + VALUE_HEADS * VALUES
    EACH: tl.constexpr = VALUE_HEADS // KEY_HEADS
    source = gl.load(moves + 4 * slot)
    target = gl.load(moves + 4 * slot + 1)
    start = gl.load(counters + 2 * slot).to(tl.int32)
    first = start - gl.load(moves + 4 * slot + 2)
    table = tables + slot * table_stride

    key_row = gl.expand_dims(gl.arange(0, KEYS, layout=KEY), 1)
    column = gl.arange(0, VALUES, layout=VALUE)
    within = head * KEYS * VALUES + key_row * VALUES + gl.expand_dims(column, 0)
    size = VALUE_HEADS * KEYS * VALUES
    there = (within >= 0) & (source >= 0)
    state = gl.load(states + source.to(tl.int64) * size + within, mask=there, other=0.0)

    key_head = head % KEY_HEADS if ALTERNATING else head // EACH
    is_first = head < KEY_HEADS if ALTERNATING else head % EACH == 0
    q_at = key_head * KEYS + gl.arange(0, KEYS, layout=LINE)
    k_at = KEY_HEADS * KEYS + q_at
    v_at = 2 * KEY_HEADS * KEYS + head * VALUES + gl.arange(0, VALUES, layout=LINE)
    q_filters = _taps(filters, q_at, WIDTH)
    k_filters = _taps(filters, k_at, WIDTH)
    v_filters = _taps(filters, v_at, WIDTH)
    q_before = _inputs(log, table, first, q_at, BLOCK, LOG, WIDTH)
    k_before = _inputs(log, table, first, k_at, BLOCK, LOG, WIDTH)
    v_before = _inputs(log, table, first, v_at, BLOCK, LOG, WIDTH)
    own_bias = gl.load(dt_bias + head)
    own_decay = gl.load(decay + head)
    weight = gl.load(norm_weight + column)
    gdc_wait(PDL)

    for row in range(first, start + count):
        is_own = row >= start
        at = tl.maximum(row - start, 0)
        own_table = table + at.to(tl.int64) * table_stride  # of a guess, which has blocks up to its own row
        kept = log + _place(own_table, row, BLOCK) * LOG
        line = kept
        pair = kept + CHANNELS
        if is_own:
            line = projected + (batch + at).to(tl.int64) * PROJECTED
            pair = gates + (batch + at).to(tl.int64) * (2 * VALUE_HEADS)
        q_new = gl.load(line + q_at)
        k_new = gl.load(line + k_at)
        v_new = gl.load(line + v_at)
        b = gl.load(pair + head)
        a = gl.load(pair + VALUE_HEADS + head)
        z = gl.load(line + CHANNELS + head * VALUES + column, mask=(column >= 0) & is_own, other=0.0).to(
            tl.float32
        )
        if is_own:
            gl.store(kept + q_at, q_new, mask=(q_at >= 0) & is_first)
            gl.store(kept + k_at, k_new, mask=(k_at >= 0) & is_first)
            gl.store(kept + v_at, v_new)
            gl.store(kept + CHANNELS + head, b)
            gl.store(kept + CHANNELS + VALUE_HEADS + head, a)
        q = unit_length(convolved(q_before, q_new, q_filters, dtype)) * SCALE
        k = unit_length(convolved(k_before, k_new, k_filters, dtype))
        v = convolved(v_before, v_new, v_filters, dtype)
        q_before = _shifted(q_before, q_new)
        k_before = _shifted(k_before, k_new)
        v_before = _shifted(v_before, v_new)
        q = gl.convert_layout(q, KEY)
        k = gl.convert_layout(k, KEY)
        v = gl.convert_layout(v, VALUE)
        factor = forget(a.to(tl.float32), own_bias, own_decay)
        state = advance(state, k, v, sigmoid(b, dtype), factor)
        if (row == start) & (target >= 0):
            gl.store(states + target.to(tl.int64) * size + within, state)
        if is_own:
            y = read_out(state, q).to(dtype).to(tl.float32)
            scale = gl.rsqrt(gl.sum(y * y, 0) / VALUES + EPS)
            y = weighed(y, scale, weight, 0.0, False).to(tl.float32)
            y = y * (z / (1.0 + gl.exp(-z)))
            to = out + (batch + at).to(tl.int64) * (VALUE_HEADS * VALUES) + head * VALUES
            gl.store(to + column, y.to(dtype))
