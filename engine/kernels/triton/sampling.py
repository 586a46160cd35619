"""From logits to tokens in one launch: penalties, temperature, top-k, top-p, min-p, one draw, bookkeeping.

The plain twin is `engine/sampling/sampler.py`. The grid is blocks of the vocabulary times rows of a batch. The program
of a row that arrives last (by a counter in device memory) finishes the row alone from the results of the others, so no
second launch is needed. A row's token does not depend on the other rows, nor on which kernel draws it.

The state of a sequence lies in its slot: `settings` fp32 (those of `scores.py`, then `logit_processors.py`), `numbers`
int64 (seed, step, top_k) and `marks`. NaN logits count as +inf. If the largest logit is not finite, the token is -1.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.ranking import GROUP, draw_from_groups, store_groups
from engine.kernels.triton.scores import (
    GENERATED,
    INFINITY,
    SEEN,
    entry,
    gumbel_of_block,
    passes,
    penalised,
    scaled,
    score,
)

RACE = tl.constexpr(0)
"""Greedy decoding, or a draw from all tokens that pass min_p."""
NARROW = tl.constexpr(1)
"""Never greedy, and 1 <= top_k <= MAX_NARROW."""
WIDE = tl.constexpr(2)
"""Never greedy; a larger top_k, or top_p without one."""
NUMBERS = tl.constexpr(8)
"""The distance between the numbers of two slots, in int64; a slot's settings lie behind its numbers."""
PART = tl.constexpr(1024)
"""The number of tokens of which one winner is kept."""


@triton.jit
def _last_to_arrive(arrived):
    """Return whether all other programs of the row have arrived; the data that they stored is then visible."""
    tl.debug_barrier()  # the stores of every thread come before the one atomic
    return tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def _commit(
    chosen, peak, settings, numbers, marks, token, history, counters, arrived,
    SLOTS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Write the token (-1 if the peak is not finite) and everything that advances with it."""
    finite = (peak > -INFINITY) & (peak < INFINITY)
    chosen = tl.where(finite, chosen, -1)
    step = tl.load(numbers + 1)
    tl.store(token, chosen.to(tl.int64))
    tl.store(history + step % SLOTS, chosen)
    if (tl.load(settings + 3) != 1.0) | (tl.load(settings + 4) != 0.0) | (tl.load(settings + 6) != 0.0):
        mark = tl.load(marks + chosen, mask=finite, other=0)
        more = (mark | SEEN) + GENERATED
        tl.store(marks + chosen, tl.where(more > mark, more, mark), mask=finite)
    tl.store(numbers + 1, step + 1)
    for i in tl.static_range(COUNTERS):
        tl.store(counters + i, tl.load(counters + i) + 1)
    tl.store(arrived, 0)


@triton.jit
def _store_winners(
    logits, marks, settings, numbers, peaks, values, names, block, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the largest logit of every part of a block, and the logit and id of the part's winner."""
    PARTS: tl.constexpr = BLOCK // PART
    part = block * PARTS + tl.arange(0, PARTS)
    lane = tl.arange(0, PART)[None, :]
    x = penalised(logits, marks, settings, part[:, None] * PART + lane, VOCAB)
    peak = tl.max(x, 1)
    # A token that fails min_p against the likeliest of its part also fails it against the likeliest of all.
    relative = scaled(x, peak[:, None], settings)
    mine = relative
    if tl.load(settings) > 0:
        mine = relative + gumbel_of_block(block * BLOCK, numbers, PARTS, PART)
    mine = tl.where(passes(relative, settings), mine, -INFINITY)
    best = tl.argmax(mine, 1)
    tl.store(peaks + part, peak)
    tl.store(values + part, tl.max(tl.where(lane == best[:, None], x, -INFINITY), 1))
    tl.store(names + part, part * PART + best)


@triton.jit
def _best_of_winners(
    logits, marks, settings, numbers, peaks, values, names, VOCAB: tl.constexpr, PLACES: tl.constexpr
):
    """Return the token that wins among the parts' winners, and the largest logit. PLACES is a power of two."""
    i = tl.arange(0, PLACES)
    there = i < (VOCAB + PART - 1) // PART
    peak = tl.max(tl.load(peaks + i, mask=there, other=-INFINITY, cache_modifier=".cg"), 0)
    winners = tl.load(names + i, mask=there, other=0, cache_modifier=".cg")
    relative = scaled(tl.load(values + i, mask=there, other=-INFINITY, cache_modifier=".cg"), peak, settings)
    scores = score(relative, winners, settings, numbers)
    best = tl.argmax(scores, 0)
    # The winner of a part may fail min_p against the likeliest token of all. Its score still bounds the part, so the
    # part is searched again, for its best token that passes, only if it would win. Without a finite peak no token would
    # ever pass.
    finite = (peak > -INFINITY) & (peak < INFINITY)
    while finite & (passes(entry(relative, best), settings) == 0):
        ids = best * PART + tl.arange(0, PART)
        x = scaled(penalised(logits, marks, settings, ids, VOCAB), peak, settings)
        mine = tl.where(passes(x, settings), score(x, ids, settings, numbers), -INFINITY)
        inner = tl.argmax(mine, 0)
        winners = tl.where(i == best, best * PART + inner, winners)
        relative = tl.where(i == best, entry(x, inner), relative)
        scores = tl.where(i == best, entry(mine, inner), scores)
        best = tl.argmax(scores, 0)
    return tl.sum(tl.where(i == best, winners, 0), 0), peak


# The alignment of active differs: it points to a step's rows, or to the one row of a slot.
@triton.jit(do_not_specialize_on_alignment=["active"])
def sampling_kernel(
    logits, stride, active, marks, settings, numbers, peaks, values, names, masses, arrived, token, history, counters,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr,
    COUNTERS: tl.constexpr, PDL: tl.constexpr, RACES: tl.constexpr, LOOK: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Draw a token for each row, of any kind, with BLOCK tokens per program.

    It runs in one launch, or in two: all programs LOOK, then one program per row has to FINISH. Finishing takes many
    registers, so a GPU runs fewer programs at once that may have to do it; few if all rows are RACES.

    logits: rows of VOCAB, any float dtype, `stride` apart; active int32 [rows]: the slot of a row, -1 for none, set
    before the kernels that this one may overlap. By slot: marks int16 [VOCAB], settings and numbers (NUMBERS apart),
    token int64, history int32 [SLOTS], counters int64 [COUNTERS]. Scratch by row: peaks fp32 [GROUPS], values fp32 and
    names int32 [PLACES], masses fp32, one per program, arrived int32, all 0. PLACES and GROUPS are powers of two: at
    least CANDIDATES and the parts of the grid, and the groups of the grid. `_commit` writes the results.
    """
    row = tl.program_id(1)
    slot = tl.load(active + row).to(tl.int64)
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    if slot < 0:
        return
    block = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    marks += slot * VOCAB
    settings += slot * (2 * NUMBERS)
    numbers += slot * NUMBERS
    peaks += row * GROUPS
    values += row * PLACES
    names += row * PLACES
    masses += row * (GROUPS // (BLOCK // GROUP))
    kind = tl.load(settings + 5)
    last = FINISH
    if LOOK:
        if RACES or kind == RACE:
            _store_winners(logits, marks, settings, numbers, peaks, values, names, block, VOCAB, BLOCK)
        else:
            store_groups(logits, marks, settings, peaks, masses, block, kind == WIDE, VOCAB, BLOCK)
        if FINISH:
            last = _last_to_arrive(arrived + row)
    if last:
        if RACES or kind == RACE:
            chosen, peak = _best_of_winners(
                logits, marks, settings, numbers, peaks, values, names, VOCAB, PLACES
            )
        else:
            chosen, peak = draw_from_groups(
                logits, marks, settings, numbers, peaks, values, names, masses, kind == WIDE, VOCAB, BLOCK, GROUPS
            )  # fmt: skip
        _commit(
            chosen, peak, settings, numbers, marks, token + slot, history + slot * SLOTS,
            counters + slot * COUNTERS, arrived + row, SLOTS, COUNTERS,
        )  # fmt: skip
