"""The groups of layers that need fewer rows than the primary group, changed together. Pure Python, no tensors.

In a network that mixes layers with a window and layers that see all rows, those that see all rows are the primary
group: the block manager's blocks are its memory. Layers with the same window and format of rows are a group with a
pool of its own (`engine/cache/group_pool.py`), where a block of the primary group has a slot or none. A table holds
there only the blocks that its next row sees, so a prefix can be resumed where every group has those.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from operator import ge
from sys import maxsize

from engine.cache.block_table import BlockTable
from engine.cache.group_pool import GroupPool
from engine.cache.live_state import LiveState
from engine.cache.marks import Marks


class Groups:
    """The pools of all groups but the primary. It belongs to the block manager; without pools, nothing is done."""

    def __init__(self, pools: Sequence[GroupPool], block_size: int, marks: Marks | None = None) -> None:
        """Keep the pools. `marks` belong to recurrent layers, whose log is one of them."""
        self.pools = pools
        self.marks = marks
        self._size = block_size

    def __bool__(self) -> bool:
        return bool(self.pools)

    def is_log(self, pool: GroupPool) -> bool:
        """Return whether a pool is that of the log of recurrent layers."""
        return self.marks is not None and pool is self.marks.log

    @property
    def but_log(self) -> list[int]:
        """The numbers of all groups but the log, from 0 for the primary."""
        return [0, *(group for group, pool in enumerate(self.pools, 1) if not self.is_log(pool))]

    def have(self, block: int, but_log: bool = False) -> bool:
        """Return whether a block has a slot in every group, the log left out or not."""
        return all(block in pool for pool in self.pools if not (but_log and self.is_log(pool)))

    def holds(self, block: int) -> bool:
        """Return whether a block has a slot in any group."""
        return any(block in pool for pool in self.pools)

    def firsts(self, blocks: int, since: int = maxsize, state: LiveState | None = None) -> list[int]:
        """Return the first block that a table of `blocks` full blocks holds in each group, with its `group_since`.

        In the log of recurrent layers it is the first that is needed to go on from the `state` of the table.
        """

        def first(pool: GroupPool) -> int:
            if self.marks is not None and self.is_log(pool):
                needed = self.marks.first(state.row) if state is not None else blocks
                return min(needed, blocks, since // self._size)
            return min(pool.window.first(blocks, self._size), since // self._size)

        return [first(pool) for pool in self.pools]

    def has_room(self, table: BlockTable, blocks: int, idle: bool) -> bool:
        """Return whether `table` can be given slots for its next `blocks` blocks. `idle`: as in `GroupPool.room`."""
        end = len(table.blocks) + blocks
        return all(
            min(blocks, end - first) <= pool.room(idle)
            for pool, first in zip(self.pools, table.firsts, strict=True)
            if table.state is not None or not self.is_log(pool)
        )

    def fit(self, path: Sequence[int], rows: int, others: Iterable[tuple[BlockTable, int]]) -> bool:
        """Do what `BlockManager.fits_beside` does, for a table that begins with the blocks `path`."""
        others = list(others)
        for group, (pool, first) in enumerate(zip(self.pools, self.firsts(len(path)), strict=True)):
            needed = pool.window.most_held(rows, self._size) - sum(map(pool.is_held, path[first:]))
            for table, more in others:
                held = len(table.blocks) - table.firsts[group]
                needed += max(pool.window.most_held(more, self._size) + 1 - held, 0)
            if needed > pool.room():
                return False
        return True

    def open(
        self, table: BlockTable, firsts: Sequence[int], now: int, fill: Callable[[int, int], bool]
    ) -> bool:
        """Hold what a new table holds of its blocks from `firsts` on. It has set `firsts` behind them.

        Where block `index` lacks a slot in a group, `fill(group, index)` gives it one and holds it. Return False if one
        cannot be given.
        """
        with ExitStack() as until_then:
            for pool, first in zip(self.pools, firsts, strict=True):
                for block in table.blocks[first:]:
                    if block in pool:  # no other block may get its slot in the meantime
                        pool.hold(block)
                        until_then.callback(pool.release, block, now)
            for group, (pool, first) in enumerate(zip(self.pools, firsts, strict=True)):
                for index in range(len(table.blocks) - 1, first - 1, -1):
                    if table.blocks[index] in pool:
                        pool.hold(table.blocks[index])
                    elif not fill(group + 1, index):
                        return False
                    table.firsts[group] = index
        return True

    def slide(self, table: BlockTable, now: Callable[[], int]) -> None:
        """Release what later rows of `table` do not see. `now` returns the time, later at every call."""
        if not self.pools:
            return
        firsts = self.firsts(table.length // self._size, table.group_since, table.state)
        for group, pool in enumerate(self.pools):
            for block in table.blocks[table.firsts[group] : firsts[group]]:
                pool.release(block, now())
            table.firsts[group] = max(table.firsts[group], firsts[group])

    def close(self, table: BlockTable, now: int) -> None:
        """Release all that `table` holds."""
        ends = self.firsts(table.length // self._size, state=table.state)
        for pool, first, end in zip(self.pools, table.firsts, ends, strict=True):
            for index in range(first, len(table.blocks)):
                pool.release(table.blocks[index], now, index >= end)
        table.firsts = [0] * len(self.pools)

    def next(self, table: BlockTable) -> list[int]:
        """Return the groups in which the next block of `table` needs a slot: the log only if the table has a state."""
        return [
            group
            for group, (pool, first) in enumerate(zip(self.pools, table.firsts, strict=True), 1)
            if len(table.blocks) >= first and (table.state is not None or not self.is_log(pool))
        ]

    def take(self, table: BlockTable, block: int, groups: Sequence[int]) -> None:
        """Give `block`, the next one of `table`, a slot in each of `groups`. There must be room.

        Raises what `GroupPool.lose` raises; then it has none.
        """
        try:
            for group in groups:
                self.pools[group - 1].take(block)
        except BaseException:
            self.release(block, 0)
            self.drop(block)
            raise
        self.leave_out(table, groups)

    def leave_out(self, table: BlockTable, groups: Sequence[int]) -> None:
        """Note that the next block of `table` is held in none but `groups`."""
        for index in range(len(self.pools)):
            if index + 1 not in groups:
                table.firsts[index] = max(table.firsts[index], len(table.blocks) + 1)

    def hold(
        self, block: int, groups: Iterable[int], now: int, undone: ExitStack, fill: Callable[[int], bool]
    ) -> bool:
        """Note that one more table holds `block` in `groups`, until `undone`; `fill` is as in `open`.

        Return False if it lacks a slot that cannot be given.
        """
        for group in groups:
            pool = self.pools[group - 1]
            if block in pool:
                pool.hold(block)
            elif not fill(group):
                return False
            undone.callback(pool.release, block, now)
        return True

    def release(self, block: int, now: int) -> None:
        """Note that one table fewer holds `block` where it has a slot, last used at the time `now`."""
        for pool in self.pools:
            if block in pool:
                pool.release(block, now)

    def drop(self, block: int) -> None:
        """Free the slots of `block`, which no table holds."""
        for pool in self.pools:
            pool.drop(block)

    def skip(self, table: BlockTable, blocks: int, now: int) -> None:
        """Hold no slots in the first `blocks` blocks of `table`, which may be more than it has yet.

        An unfinished block loses its slots, because it gets rows that they lack. See `BlockManager.reserve`.
        """
        unfinished = table.blocks[table.length // self._size :]
        self.close(table, now)
        for block in unfinished:
            self.drop(block)
        table.firsts = [blocks] * len(self.pools)

    def cut(self, table: BlockTable, blocks: int) -> None:
        """Release all but the first `blocks` blocks of `table`."""
        for group, pool in enumerate(self.pools):
            for block in table.blocks[max(blocks, table.firsts[group]) :]:
                pool.release(block, 0)
            table.firsts[group] = min(table.firsts[group], blocks)

    def merge(self, table: BlockTable, index: int, known: int) -> None:
        """Have `table` hold the block `known` instead of the equal one at `index`, whose slots it gets if need be."""
        for pool, first in zip(self.pools, table.firsts, strict=True):
            if index < first:
                continue
            if known in pool:
                pool.hold(known)
                pool.release(table.blocks[index], 0)
            else:
                pool.move(table.blocks[index], known)

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Raise AssertionError unless the pools hold exactly what these tables need."""
        for group, pool in enumerate(self.pools):
            pool.check([block for table in tables for block in table.blocks[table.firsts[group] :]])
        for table in tables:
            firsts = self.firsts(table.length // self._size, table.group_since, table.state)
            assert all(map(ge, table.firsts, firsts)), "a table holds too many blocks in a group"
            if self.marks is not None and table.state is not None:
                held = table.firsts[self.pools.index(self.marks.log)]
                assert held <= self.marks.first(table.state.row), "a table lacks rows of the log"
