"""What a step with several rows of a sequence has beside any other: its rows, and who of them may draw.

A row of a step that checks guesses is the newest token of a sequence, or a guess; of one that begins a chain of drafts
it is a token that was said since the last one, and the newest comes last. A sequence has its rows side by side.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride"])
def spread_kernel(
    slots,
    places,
    guesses,
    token,
    counters,
    tables,
    table_stride,
    row_active,
    row_token,
    row_counters,
    row_tables,
    alone_counters,
    alone_tables,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Have each row of a step read what a sequence of its own would: rows take the place of slots. Programs [rows].

    slots, places, guesses int32 [rows]: the slot of a row's sequence, -1 for none; how many rows it comes after that
    of the slot's newest token (below 0: before); its token, where it is another one. token int64 [slots], counters
    int64 [slots, 2] and tables int32 [slots, table_stride] are a `StepInput`; so are row_active int32 [rows],
    row_token, row_counters and row_tables, by row. By alone_counters int64 [rows, 2] and alone_tables int32 [rows, 1] a
    row's sequence has no block but the row's own, and the row lies in it where it does.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    tl.store(row_active + row, tl.where(slot >= 0, row, -1))
    if slot >= 0:
        place = tl.load(places + row)
        given = tl.load(guesses + row).to(tl.int64)
        newest = tl.load(token + slot)
        tl.store(row_token + row, tl.where(place == 0, newest, given))
        at = tl.load(counters + 2 * slot) + place
        position = tl.load(counters + 2 * slot + 1) + place
        tl.store(row_counters + 2 * row, at)
        tl.store(row_counters + 2 * row + 1, position)
        tl.store(alone_counters + 2 * row, at % BLOCK)
        tl.store(alone_counters + 2 * row + 1, position)
        table = tables + slot.to(tl.int64) * table_stride
        blocks = (at // BLOCK).to(tl.int32) + 1
        tl.store(alone_tables + row, tl.load(table + blocks - 1))
        for first in range(0, blocks, PART):
            index = first + tl.arange(0, PART)
            numbers = tl.load(table + index, mask=index < blocks, other=0)
            tl.store(row_tables + row.to(tl.int64) * table_stride + index, numbers, mask=index < blocks)


@triton.jit(do_not_specialize=["place"])
def follow_kernel(slots, places, guesses, token, chosen, place, ROWS: tl.constexpr):
    """Say which rows draw at `place` within their sequences: those whose token was just drawn. One program.

    slots, places, guesses and token as above; chosen int32 [ROWS, ROWS]: for each place and row the slot, or -1. Of the
    rows of the place before, those with a slot there have drawn.
    """
    row = tl.arange(0, ROWS)
    slot = tl.load(slots + row)
    here = (slot >= 0) & (tl.load(places + row) == place)
    follows = here & (row > 0) & (place > 0)
    before = tl.load(chosen + (place - 1) * ROWS + row - 1, mask=follows, other=-1)
    drawn = tl.load(token + slot, mask=follows, other=-1)
    right = (before >= 0) & (drawn == tl.load(guesses + row).to(tl.int64))
    draws = here & ((place == 0) | right)
    tl.store(chosen + place * ROWS + row, tl.where(draws, slot, -1))


@triton.jit
def seek_kernel(draws, tokens, at, steps, token, counters, numbers, PITCH: tl.constexpr):
    """Have slots go on from elsewhere in their texts, in which the row is the position. Programs [rows].

    draws, tokens, at, steps int32 [rows]: the slot, -1 for none; its newest token, the row of that, and how many tokens
    the answer has. They become those of token int64 [slots], counters int64 [slots, 2] and numbers int64 (PITCH apart;
    see `sampling.py`).
    """
    row = tl.program_id(0)
    slot = tl.load(draws + row).to(tl.int64)
    if slot >= 0:
        place = tl.load(at + row).to(tl.int64)
        tl.store(token + slot, tl.load(tokens + row).to(tl.int64))
        tl.store(counters + 2 * slot, place)
        tl.store(counters + 2 * slot + 1, place)
        tl.store(numbers + slot * PITCH + 1, tl.load(steps + row).to(tl.int64))
