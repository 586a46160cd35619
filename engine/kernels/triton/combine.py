"""Combines the partial outputs of a decode step's attention, from `attention.py` and `attention_mma.py`."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

MOST_TILES = tl.constexpr(128)
UNIT = tl.constexpr(128)
"""The size of a part is a multiple of this many rows, so all tiles but the last are whole."""


@triton.jit
def shared_part(rows, parts):
    """Return the rows per part when `rows` rows are cut into up to `parts` parts."""
    return tl.maximum(tl.cdiv(tl.cdiv(rows, parts), UNIT), 1) * UNIT


@triton.jit
def own_part(rows, parts, least, usual):
    """Return the same for rows that a sequence has alone, with at least `least` rows per part. Parts grow to `usual`
    rows before there are more than half of `parts`."""
    fewer = tl.minimum(shared_part(rows, tl.maximum(parts // 2, 1)), usual)
    return tl.maximum(tl.maximum(shared_part(rows, parts), fewer), least)


@triton.jit
def parts_of_tile(used, parts, chunks, own):
    """Return the number of parts that each of `used` tiles gets."""
    return tl.minimum(parts // tl.maximum(used, 1), chunks - own)


@triton.jit
def gated_by(mixed, gates, head, columns, DIM: tl.constexpr, BY_HEAD: tl.constexpr):
    """Return the output of a head times the sigmoid of its gate, or its gates: both are rounded to their dtype.

    gates [rows, heads] if BY_HEAD, otherwise [rows, heads, DIM]; `head` counts the heads of all rows.
    """
    at = head + columns * 0 if BY_HEAD else head * DIM + columns
    gate = tl.load(gates + at, mask=columns < DIM, other=0.0).to(tl.float32)
    shares = (1.0 / (1.0 + tl.exp(-gate))).to(mixed.dtype).to(tl.float32)
    return (mixed.to(tl.float32) * shares).to(mixed.dtype)


@triton.jit
def _in_order(
    partial, lse, first, last, sink, HQ: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Add up parts 0 to `last`, fewer than MOST, one after the other: their sum fp32 [D], that of their shares, and the
    largest score."""
    columns = tl.arange(0, D)
    logs, top = (), sink
    for number in tl.static_range(MOST):
        found = tl.load(lse + first + number * HQ, mask=number <= last, other=-float("inf"))
        logs += (found,)
        top = tl.maximum(top, found)
    mixed, total = tl.zeros([D], tl.float32), top * 0.0
    for number in tl.static_range(MOST):
        share = tl.exp2(logs[number] - top)
        inside = (number <= last) & (columns < DIM)
        mixed += share * tl.load(partial + (first + number * HQ) * DIM + columns, mask=inside, other=0.0)
        total += share
    return mixed, total, top


@triton.jit
def _pairwise(values, logs, sink):
    """Add up values [parts, D] with a tree, by their scores; return what `_in_order` does."""
    top = tl.maximum(tl.max(logs, 0), sink)
    share = tl.exp2(logs - top)
    return tl.sum(values * share[:, None], 0), tl.sum(share, 0), top


@triton.jit
def combine_kernel(
    partial,
    lse,
    active,
    counters,
    out,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr = 0,
    sinks=None,
    gates=None,
    BY_HEAD: tl.constexpr = False,
    IN_ORDER: tl.constexpr = 0,
):
    """Combine the parts of `attention_kernel` into out [rows, HQ, DIM]; PADDED is a power of two from the chunks in use
    on.

    A chunk has CHUNK rows, doubled up to DOUBLINGS times while CHUNKS of them do not reach the token. Missing chunks of
    a sequence add exact zeros. The grid is [HQ, rows]. sinks [HQ] is a score per head that takes part in the softmax
    but has no value; gates and BY_HEAD are as in `gated_by`. Up to IN_ORDER parts of a sequence are added up one
    after the other, as in `combined`.
    """
    gdc_launch_dependents(PDL)
    head = tl.program_id(0)
    batch = tl.program_id(1)
    chunks = tl.arange(0, PADDED)
    columns = tl.arange(0, D)
    slot = tl.load(active + batch)
    row = tl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32)
    size = CHUNK
    for _ in tl.static_range(DOUBLINGS):
        size = tl.where(row >= size * CHUNKS, 2 * size, size)
    last = row // size
    if WINDOW > 0:
        last -= tl.maximum(row - (WINDOW - 1), 0) // size
    gdc_wait(PDL)
    if slot >= 0:
        first, sink = batch * CHUNKS * HQ + head, -float("inf")
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        if PADDED <= IN_ORDER:
            mixed, total, top = _in_order(partial, lse, first, last, sink, HQ, D, DIM, PADDED)
        else:
            part, there = first + chunks * HQ, chunks <= last
            if IN_ORDER > 0:
                there = there & (last >= IN_ORDER)
            logs = tl.load(lse + part, mask=there, other=-float("inf"))
            inside = there[:, None] & (columns < DIM)[None, :] if DIM < D else there[:, None]
            values = tl.load(partial + part[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
            if IN_ORDER == 0:  # noqa: SIM114 - this is known when the kernel is compiled
                mixed, total, top = _pairwise(values, logs, sink)
            elif last >= IN_ORDER:
                mixed, total, top = _pairwise(values, logs, sink)
            else:
                mixed, total, top = _in_order(partial, lse, first, last, sink, HQ, D, DIM, IN_ORDER)
        if sinks is not None:
            total += tl.exp2(sink - top)
        mixed *= 1.0 / total
        at = (batch * HQ + head) * DIM + columns
        mixed = mixed.to(out.dtype.element_ty)
        if gates is not None:
            mixed = gated_by(mixed, gates, batch * HQ + head, columns, DIM, BY_HEAD)
        if DIM == D:
            tl.store(out + at, mixed)
        else:
            tl.store(out + at, mixed, mask=columns < DIM)


@triton.jit(do_not_specialize=["tiles", "chunks", "parts", "own", "least", "usual"])
def combine_parts_kernel(
    partial,
    lse,
    active,
    counters,
    shared,
    members,
    out,
    tiles,
    chunks,
    parts,
    own,
    least,
    usual,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    PADDED: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
    IN_ORDER: tl.constexpr = 0,
    gates=None,
    BY_HEAD: tl.constexpr = False,
):
    """Combine the parts of `parts_kernel` into out [rows, HQ, DIM]; PADDED is a power of two, at least a row's parts.

    Missing parts of a sequence add exact zeros. The grid is [HQ, rows]. Without SHARES, no sequence shares rows. Up to
    IN_ORDER parts of a sequence that shares none are added up one after the other.
    """
    gdc_launch_dependents(PDL)
    head = tl.program_id(0)
    batch = tl.program_id(1)
    number = tl.arange(0, PADDED)
    columns = tl.arange(0, D)
    slot = tl.load(active + batch)
    row = tl.load(counters + 2 * slot, mask=slot >= 0, other=0).to(tl.int32)
    common, together = 0, 0
    if SHARES:
        tile = tl.arange(0, MOST_TILES)
        used = tl.sum((tl.load(members + tile * MEMBERS, mask=tile < tiles, other=-1) >= 0).to(tl.int32), 0)
        common = tl.load(shared + batch)
        together = tl.cdiv(common, shared_part(common, parts_of_tile(used, parts, chunks, own)))
    alone = tl.maximum(tl.cdiv(row - common, own_part(row - common, own, least, usual)), 1)
    there = (number < alone) | ((number >= own) & (number < own + together))
    gdc_wait(PDL)
    if slot >= 0:
        first, none = batch * chunks * HQ + head, -float("inf")
        if PADDED <= IN_ORDER and not SHARES:
            mixed, total, _ = _in_order(partial, lse, first, alone - 1, none, HQ, D, DIM, PADDED)
        else:
            in_order = (alone <= IN_ORDER) & (together == 0)
            part = first + number * HQ
            there = there & (in_order == 0)
            logs = tl.load(lse + part, mask=there, other=-float("inf"))
            inside = there[:, None] & (columns < DIM)[None, :]
            values = tl.load(partial + part[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
            if IN_ORDER == 0:  # noqa: SIM114 - this is known when the kernel is compiled
                mixed, total, _ = _pairwise(values, logs, none)
            elif in_order == 0:
                mixed, total, _ = _pairwise(values, logs, none)
            else:
                mixed, total, _ = _in_order(partial, lse, first, alone - 1, none, HQ, D, DIM, IN_ORDER)
        at, mixed = (batch * HQ + head) * DIM + columns, (mixed / total).to(out.dtype.element_ty)
        if gates is not None:
            mixed = gated_by(mixed, gates, batch * HQ + head, columns, DIM, BY_HEAD)
        tl.store(out + at, mixed, mask=columns < DIM)
