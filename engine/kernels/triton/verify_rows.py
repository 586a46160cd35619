"""Kernels for steps with several rows per sequence: they fill in the rows, and decide which of them draw.

In a step that checks guesses, a row is the newest token of a sequence or a guess. In a step that begins a chain of
drafts, it is a token generated since the last chain, and the newest comes last. The rows of a sequence are adjacent.
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
    moves,
    row_moves,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Give each row of a step the inputs of a sequence of its own: rows take the place of slots. The grid is [rows].

    slots, places, guesses int32 [rows]: the slot of a row's sequence, -1 for none; how many rows it comes after the row
    of the slot's newest token (negative: before it); its token, unless that is the newest. token int64 [slots],
    counters int64 [slots, 2] and tables int32 [slots, table_stride] are those of a `StepInput`. row_active int32
    [rows], row_token, row_counters and row_tables are those of the `StepInput` to fill, by row. alone_counters int64
    [rows, 2] and alone_tables int32 [rows, 1] describe a sequence that has only the row's own block, with the row at
    its true place in it. moves int32 [slots, 4] are those of a `StepInput`; in row_moves int32 [rows, 4], the first row
    of a sequence counts its rows, and the others have none. BLOCK is the number of rows of a block; PART entries of a
    table are copied at once. ROWS is the length of `slots`.
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
        number = tl.arange(0, 4)
        same = tl.load(slots + tl.arange(0, ROWS)) == slot
        is_first = tl.load(slots + row - 1, mask=row > 0, other=-1) != slot
        count = tl.where(is_first, tl.sum(same.to(tl.int32), 0), 0)
        found = tl.where(number < 3, tl.load(moves + 4 * slot + number), count)
        tl.store(row_moves + 4 * row + number, found)
        for first in range(0, blocks, PART):
            index = first + tl.arange(0, PART)
            numbers = tl.load(table + index, mask=index < blocks, other=0)
            tl.store(row_tables + row.to(tl.int64) * table_stride + index, numbers, mask=index < blocks)


@triton.jit(do_not_specialize=["place"])
def follow_kernel(slots, places, guesses, token, chosen, place, ROWS: tl.constexpr):
    """Decide which rows at `place` in their sequences draw: those whose token was just drawn. Runs one program.

    slots, places, guesses and token are as in `spread_kernel`. chosen int32 [ROWS, ROWS] has the slot of each row that
    draws, by place and row, else -1; this writes line `place` and reads the line before it.
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
    """Make slots continue from elsewhere in their texts, whose rows and positions are equal. The grid is [rows].

    draws, tokens, at, steps int32 [rows]: the slot, -1 for none; its newest token; the row of that token; the number of
    tokens of the answer. They are written to token int64 [slots], counters int64 [slots, 2] and numbers int64, whose
    slots lie PITCH apart (see `sampling.py`).
    """
    row = tl.program_id(0)
    slot = tl.load(draws + row).to(tl.int64)
    if slot >= 0:
        place = tl.load(at + row).to(tl.int64)
        tl.store(token + slot, tl.load(tokens + row).to(tl.int64))
        tl.store(counters + 2 * slot, place)
        tl.store(counters + 2 * slot + 1, place)
        tl.store(numbers + slot * PITCH + 1, tl.load(steps + row).to(tl.int64))
