"""The recurrence of gated delta nets over the rows of prompts, in chunks on tensor cores.

With the decays e of the rows of a chunk since its start, the changes u that its rows make of the state S before it
solve a triangular system (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length"):

    u[i] = beta[i] * (v[i] - e[i] * k[i] @ S - the sum of e[i] / e[j] * (k[i] @ k[j]) * u[j] over j < i)

The first kernel inverts the system of each chunk, row after row, for all chunks at once. The second walks over the
chunks, with the state in registers. A row's bits depend on where its chunk begins and ends.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

ROWS = tl.constexpr(16)
"""The most rows of a chunk."""


PRECISE = tl.constexpr("tf32x3")


@triton.jit
def _product(left, right, PRECISION: tl.constexpr):
    """Multiply fp32 matrices on tensor cores; "tf32x3" is nearly as exact as fp32, "tf32" takes a third of the time."""
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _rows(given, row, inside, head, column, HEADS: tl.constexpr, SIZE: tl.constexpr, REAL: tl.constexpr):
    """Load columns of a head of rows from `given` [rows, HEADS, SIZE], of which REAL are real: fp32 [rows, columns]."""
    at = given + (row * HEADS + head)[:, None] * SIZE + column[None, :]
    return tl.load(at, mask=inside[:, None] & (column < REAL)[None, :], other=0.0).to(tl.float32)


@triton.jit
def chunk_kernel(
    queries, keys, factors, betas, chunks, inverses, scores, decays,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, ALTERNATING: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Prepare chunks of what `delta_inputs_kernel` made, for `walk_chunks_kernel`. The grid is [chunks, HEADS].

    chunks int32 [chunks, 4] are those of `engine.kernels.walks.WalkChunks`. Written are for each chunk and head the
    inverse of its system, times beta of its columns, and q @ k of its rows with their decays, each fp32
    [chunks, HEADS, ROWS, ROWS], and the decays from its start to its rows and from these to its end, fp32
    [chunks, HEADS, 2, ROWS]. PART of the keys are read at once.
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head % KEY_HEADS if ALTERNATING else head // (HEADS // KEY_HEADS)
    line = tl.arange(0, ROWS)
    row = tl.load(chunks + 4 * chunk).to(tl.int64) + line
    inside = row < tl.load(chunks + 4 * chunk + 1)
    products = tl.zeros([ROWS, ROWS], tl.float32)
    score = tl.zeros([ROWS, ROWS], tl.float32)
    for first in range(0, KEYS, PART):
        column = first + tl.arange(0, PART)
        k = tl.trans(_rows(keys, row, inside, key_head, column, KEY_HEADS, KEYS, KEYS))
        q = _rows(queries, row, inside, key_head, column, KEY_HEADS, KEYS, KEYS)
        products += _product(tl.trans(k), k, PRECISE)
        score += _product(q, k, PRECISE)
    factor = tl.load(factors + row * HEADS + head, mask=inside, other=1.0)
    beta = tl.load(betas + row * HEADS + head, mask=inside, other=0.0)
    total = tl.cumsum(tl.log(tl.maximum(factor, 1e-37)), 0)
    # Turned: with the rows that are changed along the columns.
    lasting = tl.exp(tl.minimum(total[None, :] - total[:, None], 0.0))
    system = tl.where(line[:, None] < line[None, :], beta[None, :] * lasting * products, 0.0)
    inverse = tl.where(line[:, None] == line[None, :], 1.0, 0.0)
    for i in tl.static_range(1, ROWS):
        own = tl.sum(tl.where(line[None, :] == i, system, 0.0), 1)
        found = tl.sum(own[:, None] * inverse, 0)
        inverse = tl.where(line[:, None] == i, inverse - found[None, :], inverse)
    score = tl.where(line[:, None] >= line[None, :], tl.trans(lasting) * score, 0.0)
    at = (chunk * HEADS + head) * ROWS
    place = (at + line)[:, None] * ROWS + line[None, :]
    tl.store(inverses + place, inverse * beta[None, :])
    tl.store(scores + place, score)
    tl.store(decays + 2 * at + line, tl.exp(total))
    tl.store(decays + 2 * at + ROWS + line, tl.exp(tl.min(total, 0) - total))


@triton.jit
def walk_chunks_kernel(
    queries, keys, values, inverses, scores, decays, states, spans, ends, chunks, out,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr,
    ALTERNATING: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of spans. The grid is [spans, HEADS, cdiv(V, BLOCK)].

    states fp32 [slots, HEADS, K, V]; spans are those of `Walks`, ends and chunks those of `WalkChunks` in
    `engine.kernels.walks`; out [T, HEADS, V]. Products are computed with PRECISION.
    """
    span = spans + tl.program_id(0) * 8
    head = tl.program_id(1)
    key_head = head % KEY_HEADS if ALTERNATING else head // (HEADS // KEY_HEADS)
    ends += tl.program_id(0)
    own, shift = tl.load(span + 1), tl.load(span + 3)
    source = tl.load(span + 4).to(tl.int64)
    line = tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = (key < K)[:, None] & (column < V)[None, :]
    states += head * (K * V) + key[:, None] * V + column[None, :]
    state = tl.load(states + source * (HEADS * K * V), mask=there & (source >= 0), other=0.0)
    for number in tl.range(tl.load(ends), tl.load(ends + 1), num_stages=STAGES):
        chunk = chunks + 4 * number
        row = tl.load(chunk).to(tl.int64) + line
        stop = tl.load(chunk + 1)
        inside = row < stop
        k = _rows(keys, row, inside, key_head, key, KEY_HEADS, KEYS, KEYS)
        q = _rows(queries, row, inside, key_head, key, KEY_HEADS, KEYS, KEYS)
        v = _rows(values, row, inside, head, column, HEADS, V, V)
        at = (number * HEADS + head.to(tl.int64)) * ROWS
        place = (at + line)[:, None] * ROWS + line[None, :]
        inverse, score = tl.load(inverses + place), tl.load(scores + place)
        decay, rest = tl.load(decays + 2 * at + line), tl.load(decays + 2 * at + ROWS + line)
        whole = tl.load(decays + 2 * at + ROWS - 1)
        change = _product(inverse, v - decay[:, None] * _product(k, state, PRECISION), PRECISION)
        y = decay[:, None] * _product(q, state, PRECISION) + _product(score, change, PRECISION)
        state = whole * state + _product(tl.trans(k), rest[:, None] * change, PRECISION)
        seen = (inside & (row >= own))[:, None] & (column < V)[None, :]
        to = out + ((row - shift) * HEADS + head)[:, None] * V + column[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=seen)
        slot = tl.load(chunk + 2)
        if slot >= 0:
            tl.store(states + slot.to(tl.int64) * (HEADS * K * V), state, mask=there)
