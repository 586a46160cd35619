"""The rows of a sequence after which marks of recurrent states are taken (see `engine/cache/marks.py`)."""

from engine.cache.block_table import BlockTable
from engine.cache.live_state import StatePlan
from engine.cache.marks import LOG_ROWS
from engine.schedule.sequence import Sequence

INTERVAL = 512
"""In a long text there is a mark after so many rows, until there are too many."""
BEFORE_ANSWER = 16
"""There is a mark so many rows before the end of a prompt: the next prompt may part from it where the text that opens
an answer begins, and from there on the log leads to any row."""
BACK = LOG_ROWS // 2
"""An answer has a mark after each of so many rows, the last two of which are kept: then the log leads to all rows but
the oldest of the last LOG_ROWS."""


def state_plan(sequence: Sequence, rows: int) -> StatePlan:
    """Return the plan of a step that computes the next `rows` rows of a sequence, without those of guesses."""
    start = sequence.computed
    stop = start + rows
    if sequence.joined or sequence.decodes:
        # In a slot, a token that is drawn again and differs takes back the step after it, which was launched already.
        return answer_plan(sequence.table, start, rows, keeps=bool(sequence.known))
    edges = (row for row in sequence.rows.edges if start < row <= stop)
    return reading_plan(start, rows, (*edges, sequence.prompt_tokens - BEFORE_ANSWER))


def answer_plan(table: BlockTable | None, start: int, rows: int, keeps: bool = False) -> StatePlan:
    """Return the plan of a step that computes `rows` rows of an answer from row `start` on. `keeps` is as in
    `StatePlan`."""
    at = {row for row in range(start + 1, start + rows + 1) if row % BACK == 0}
    state = table.state if table is not None else None
    if state is not None and state.row // BACK < start // BACK:  # right guesses have passed such a row
        at.add(start + 1)
    return StatePlan(rows, tuple(at), is_brief=True, keeps=keeps)


def reading_plan(start: int, rows: int, at: tuple[int, ...], idle: bool = False) -> StatePlan:
    """Return the plan of a step that computes `rows` rows of a prompt from row `start` on, with marks `at` some rows.
    `idle` is as in `StatePlan`."""
    spaced = range((start // INTERVAL + 1) * INTERVAL, start + rows + 1, INTERVAL)
    return StatePlan(rows, at, idle=idle, spaced=tuple(spaced))
