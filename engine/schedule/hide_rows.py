"""Hides rows of a conversation: the rows after them move up, with their KV unchanged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from sys import maxsize

from engine import batch
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.live_state import StatePlan
from engine.cache.rows import Rows, Span
from engine.schedule.computing import Computing
from engine.schedule.scheduler import MaskedRowsEvictedError


@dataclass(frozen=True, slots=True)
class Hiding:
    """Rows, and what is left of them without some spans."""

    rows: Rows
    hidden: Rows
    spans: Sequence[Span]
    since: int = maxsize
    """Which of the rows is the first that has yet to move up, if all from there on must be remembered."""

    @property
    def kept(self) -> list[Span]:
        """The parts of the rows that are not hidden."""
        starts, ends = [start for start, _ in self.spans], [end for _, end in self.spans]
        return [*zip([0, *ends], [*starts, len(self.rows)], strict=True)]

    @property
    def origin(self) -> list[int]:
        """For each row that is left, which of all rows it was."""
        return [row for begin, end in self.kept for row in range(begin, end)]

    def parts(self, most: int) -> "Iterator[Hiding]":
        """Yield longer and longer beginnings: the rows before the first span, and then up to `most` rows more."""
        origin, first = self.origin, self.spans[0][0]
        before = self.rows.prefix(first)
        yield Hiding(before, before, ())
        for start in range(first, len(origin), most):
            stop = min(start + most, len(origin))
            rows = self.rows.prefix(origin[stop - 1] + 1)
            spans = [span for span in self.spans if span[1] <= len(rows)]
            yield Hiding(rows, self.hidden.prefix(stop), spans, origin[start])


def hide(whole: Hiding, blocks: BlockManager, present: int, move: Callable[[Hiding], None]) -> None:
    """Have `move` move up rows of which `present` are present: it makes the rest present, and then calls `move_up`.

    If the log of recurrent layers does not reach back over all that moves up, or has no room for it a second time, rows
    are computed again, and move up in parts. Raises what `move` raises.
    """
    if blocks.marks is None:
        return move(whole)
    most = max(blocks.marks.log.num_slots // 4, 1) * blocks.block_size
    if len(whole.rows) - present <= most:
        with suppress(MaskedRowsEvictedError, OutOfBlocksError):
            return move(whole)
    for part in whole.parts(most):
        move(part)
    return None


def move_up(computing: Computing, hiding: Hiding, idle: bool) -> None:
    """Copy rows that are not hidden to the places that they have then. Call it on the loop's thread.

    The state of recurrent layers after the rows is that before the first span, walked over the log of the rows that are
    left. Raises MaskedRowsEvictedError if rows are missing, OutOfBlocksError if there is no room, what a copy raises.
    """
    scheduler, rows, hidden = computing.scheduler, hiding.rows, hiding.hidden
    blocks = scheduler.blocks
    if blocks.match(hidden.keys) == len(hidden):
        return  # idle work on the same turn has done it in the meantime
    kept, origin, size = hiding.kept, hiding.origin, blocks.block_size
    with ExitStack() as tables:
        # The rows to copy may lie before the window of the last row. In the groups with a window, those before the
        # window of the hidden rows are left out. Of recurrent layers, all that was logged after the span is needed.
        present = blocks.match(hidden.keys)
        whole = (
            min(blocks.groups.firsts(len(hidden) // size), default=0) * size if blocks.marks is None else 0
        )
        source = blocks.open(rows.keys, idle, origin[present], origin[max(present, whole)])
        tables.callback(blocks.close, source)
        target = blocks.open(hidden.keys, idle)
        tables.callback(blocks.close, target)
        first = target.length  # the first row that is not present yet
        begins = zip(
            [first, *[max(first, whole)] * len(source.firsts)], [source.first, *source.firsts], strict=True
        )
        missing = first < len(hidden) and any(origin[row] < block * size for row, block in begins)
        if source.length < len(rows) or missing:
            raise MaskedRowsEvictedError("masked rows were evicted")
        origins = blocks.origins(source)
        for start, stop, is_bare in ((first, whole, True), (max(first, whole), len(hidden), False)):
            if start >= stop:
                continue
            scheduler.reserve(target, stop - start, idle, is_bare)
            runs = [
                (max(begin, origin[start]), min(end, origin[stop - 1] + 1))
                for begin, end in kept
                if end > origin[start] and begin < origin[stop - 1] + 1
            ]
            computing.cache.copy_path(source.blocks, runs, target.blocks, start, groups=not is_bare)
            blocks.commit(target, hidden.keys[start:stop], [origins[row] for row in origin[start:stop]])
        if target.state is not None and target.state.row < target.length:
            with suppress(OutOfBlocksError):  # then the next step reads the log
                _walk(computing, target, rows.token_ids[-1], hidden.next_position, idle)


def _walk(computing: Computing, table: BlockTable, token: int, position: int, idle: bool) -> None:
    """Bring the state of `table` to its end, over the rows of the log.

    That is the beginning of a step. So a step computes a row after the end, of any token: what it writes is overwritten
    by the row that comes there. Raises OutOfBlocksError if there is no room.
    """
    computing.scheduler.reserve(table, 1, idle, plan=StatePlan(0, idle=idle))
    assert table.state is not None
    span = batch.Span(
        tuple(table.blocks),
        table.length,
        1,
        [token],
        [position],
        answer=table.length,
        states=table.state.moves,
    )
    computing.runner.run(batch.StepBatch((span,)))
    computing.scheduler.blocks.commit(table, [])
