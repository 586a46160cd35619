"""Hides rows of a conversation: the rows after them move up, with their KV unchanged."""

from collections.abc import Sequence
from contextlib import ExitStack

from engine.cache.blocks import BlockManager
from engine.cache.kv_cache import KVCache
from engine.cache.rows import Rows, Span
from engine.schedule.scheduler import MaskedRowsEvictedError, Scheduler


def move_up(
    blocks: BlockManager,
    cache: KVCache,
    scheduler: Scheduler,
    rows: Rows,
    hidden: Rows,
    spans: Sequence[Span],
    keep_rows: bool,
    idle: bool,
) -> None:
    """Copy `rows` without those in `spans` to the places of `hidden`, their rows. Call it on the loop's thread.

    With `keep_rows`, `rows` stay in the cache, too. Raises MaskedRowsEvictedError if they are not all present,
    OutOfBlocksError if there is no room, and what a copy raises.
    """
    if blocks.match(hidden.keys) == len(hidden):
        return  # idle work on the same turn has done it in the meantime
    starts, ends = zip(*spans, strict=True)
    # The parts of `rows` that are not hidden.
    kept = [*zip([0, *ends], [*starts, len(rows)], strict=True)]
    origin = [row for begin, end in kept for row in range(begin, end)]
    size = blocks.block_size
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
            cache.copy_path(source.blocks, runs, target.blocks, start, groups=not is_bare)
            blocks.commit(target, hidden.keys[start:stop], [origins[row] for row in origin[start:stop]])
    if not keep_rows:
        blocks.forget(rows.keys, starts[0])
