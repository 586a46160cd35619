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
    with ExitStack() as tables:
        # The rows to copy may lie before the window of the last row.
        source = blocks.open(rows.keys, idle, since=origin[blocks.match(hidden.keys)])
        tables.callback(blocks.close, source)
        target = blocks.open(hidden.keys, idle)
        tables.callback(blocks.close, target)
        first = target.length  # the first row that is not present yet
        begin = max([source.first, *source.firsts]) * blocks.block_size
        missing = first < len(hidden) and origin[first] < begin
        if source.length < len(rows) or missing:
            raise MaskedRowsEvictedError("masked rows were evicted")
        origins = blocks.origins(source)
        scheduler.reserve(target, len(hidden) - first, idle)
        if first < len(hidden):
            runs = [(max(begin, origin[first]), end) for begin, end in kept if end > origin[first]]
            cache.copy_path(source.blocks, runs, target.blocks, first)
        blocks.commit(target, hidden.keys[first:], [origins[row] for row in origin[first:]])
    if not keep_rows:
        blocks.forget(rows.keys, starts[0])
