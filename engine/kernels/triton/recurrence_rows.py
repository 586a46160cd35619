"""Recurrences over the rows of prompts, row by row, with the states in registers.

The plain twins are `models/reference/delta_net.py` and `mamba2.py` beside it. What is C, B and x there is q, k and v
here. A program serves one sequence, one head and some columns of its state, which depend on no others. A warp has
COLUMNS of them for all keys, so no sum leaves it. While rows are computed, the next tiles of rows are copied into
shared memory.

Every row is computed by the same operations in the same order, so a text has the same bits however it is cut.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
import triton.language as tl

from engine.kernels.triton.delta_rule import advance, read_out
from engine.kernels.triton.gluon import async_copy, constexpr_function, gl, jit

COLUMNS = tl.constexpr(8)
"""The columns of a state that a warp has. A thread has two of them for an eighth of the keys: with one, it would load
as many keys for half as many products, and shared memory is busy already."""


@constexpr_function
def rows_layout(keys, warps):
    """Return the layout of [keys, COLUMNS * warps] numbers of states, whose sums have the order of `state_layout`."""
    return gl.BlockedLayout([min(keys // 8, 4), 2], [8, 4], [1, warps], [1, 0])


@jit
def add(state, k, v, step, factor):
    """Return a state fp32 [keys, columns] after a row of a selective state space, k [keys] and v [columns]."""
    return state * factor + gl.expand_dims(k, 1) * gl.expand_dims(step * v, 0)


@jit
def _copy(
    place, given, first, end, head, column,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Start copying WIDTH numbers from `column` on of a head of TILE rows of `given` [rows, HEADS, SIZE]; zeros from
    row `end` on."""
    number = gl.arange(0, TILE * WIDTH, layout=FLAT)
    row, column = first + number // WIDTH, column + number % WIDTH
    at = (row.to(tl.int64) * HEADS + head) * SIZE + column
    async_copy.async_copy_global_to_shared(place, given + at, mask=(row < end) & (column < SIZE))


@jit
def walk_kernel(
    queries, keys, values, factors, betas, skip, states, spans, saves, out,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr,
    DELTA: tl.constexpr, ALTERNATING: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Walk over the rows of spans that a kernel of `recurrence_inputs.py` made. The grid is [spans, HEADS, blocks of
    columns].

    spans and saves int32 are those of `engine.kernels.walks.Walks`; out [T, HEADS, V]. With DELTA, states fp32
    [slots, HEADS, K, V] follow the delta rule; otherwise they are a selective state space, fp32 [slots, HEADS, V, K],
    and skip fp32 [HEADS] times v is added to the outputs. KEYS is at least 8, and K rounded up to a power of two.
    """
    L: tl.constexpr = rows_layout(KEYS, WARPS)
    ROW: tl.constexpr = gl.SliceLayout(1, L)
    COLUMN: tl.constexpr = gl.SliceLayout(0, L)
    FOURS: tl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    ONES: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    PLAIN: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BLOCK: tl.constexpr = COLUMNS * WARPS
    span = spans + gl.program_id(0) * 8
    head = gl.program_id(1)
    block = gl.program_id(2) * BLOCK
    key_head = head % KEY_HEADS if ALTERNATING else head // (HEADS // KEY_HEADS)
    row, own, end, shift = gl.load(span), gl.load(span + 1), gl.load(span + 2), gl.load(span + 3)
    source, save, last = gl.load(span + 4).to(tl.int64), gl.load(span + 5), gl.load(span + 6)
    key = gl.expand_dims(gl.arange(0, KEYS, layout=ROW), 1)
    line = block + gl.arange(0, BLOCK, layout=COLUMN)
    column = gl.expand_dims(line, 0)
    there = (key < K) & (column < V)
    states += head * (K * V) + (key * V + column if DELTA else column * K + key)
    state = gl.load(states + source * (HEADS * K * V), mask=there & (source >= 0), other=0.0)
    held_q = gl.allocate_shared_memory(tl.float32, [STAGES, TILE * KEYS], PLAIN)
    held_k = gl.allocate_shared_memory(tl.float32, [STAGES, TILE * KEYS], PLAIN)
    held_v = gl.allocate_shared_memory(values.dtype.element_ty, [STAGES, TILE * BLOCK], PLAIN)
    held_factor = gl.allocate_shared_memory(tl.float32, [STAGES, TILE], PLAIN)
    held_beta = gl.allocate_shared_memory(tl.float32, [STAGES, TILE], PLAIN)
    direct = 0.0 if skip is None else gl.load(skip + head)
    out += head * V + line
    while save <= last:
        stop = end
        if save < last:
            stop = gl.load(saves + 2 * save)
        for tile in range(1 - STAGES, (stop - row + TILE - 1) // TILE):
            ahead = row + (tile + STAGES - 1) * TILE
            if ahead < stop:
                at = (tile + STAGES - 1) % STAGES
                _copy(held_q.index(at), queries, ahead, stop, key_head, 0, KEY_HEADS, KEYS, KEYS, TILE, FOURS)
                _copy(held_k.index(at), keys, ahead, stop, key_head, 0, KEY_HEADS, KEYS, KEYS, TILE, FOURS)
                _copy(held_v.index(at), values, ahead, stop, head, block, HEADS, V, BLOCK, TILE, FOURS)
                _copy(held_factor.index(at), factors, ahead, stop, head, 0, HEADS, 1, 1, TILE, ONES)
                _copy(held_beta.index(at), betas, ahead, stop, head, 0, HEADS, 1, 1, TILE, ONES)
            async_copy.commit_group()
            if tile >= 0:
                async_copy.wait_group(STAGES - 1)
                at = tile % STAGES
                for i in tl.static_range(TILE):
                    now = row + tile * TILE + i
                    q = held_q.index(at).slice(i * KEYS, KEYS).load(ROW)
                    k = held_k.index(at).slice(i * KEYS, KEYS).load(ROW)
                    v = held_v.index(at).slice(i * BLOCK, BLOCK).load(COLUMN).to(tl.float32)
                    beta = held_beta.index(at).slice(i, 1).load(COLUMN)
                    factor = held_factor.index(at).slice(i, 1).load(COLUMN)
                    factor = gl.where(now < stop, factor, 1.0)  # rows beyond the end change nothing
                    factor = gl.expand_dims(factor, 0)
                    if DELTA:
                        state = advance(state, k, v, beta, factor)
                        y = read_out(state, q)
                    else:
                        state = add(state, k, v, beta, factor)
                        y = read_out(state, q) + direct * v
                    place = (now - shift).to(tl.int64) * (HEADS * V)
                    seen = (now >= own) & (now < stop) & (line < V)
                    gl.store(out + place, y.to(out.dtype.element_ty), mask=seen)
        row = stop
        if save < last:
            slot = gl.load(saves + 2 * save + 1).to(tl.int64)
            gl.store(states + slot * (HEADS * K * V), state, mask=there)
        save += 1
