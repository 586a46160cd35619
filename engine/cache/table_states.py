"""The states of recurrent layers, as block tables change. Pure Python, no tensors.

`engine/cache/marks.py` has their slots. Without recurrent layers, nothing is done.
"""

from collections.abc import Callable, Iterator, Sequence

from engine.batch import NONE
from engine.cache.block import Block, Key
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.eviction import Eviction
from engine.cache.groups import Groups
from engine.cache.live_state import LiveState, StatePlan
from engine.cache.marks import Place
from engine.cache.prefix_index import PrefixIndex


class TableStates:
    """It belongs to the block manager."""

    def __init__(
        self, groups: Groups, index: PrefixIndex, blocks: Sequence[Block], eviction: Eviction
    ) -> None:
        """`blocks` is the block manager's list of the blocks that are not gone, by id; its entries change."""
        self.marks = groups.marks
        self._groups = groups
        self._index = index
        self._blocks = blocks
        self._eviction = eviction

    def fit(self, tables: int) -> bool:
        """Return whether so many tables can have states at once."""
        return self.marks is None or tables <= self.marks.num_slots

    def open(
        self, path: Sequence[Block], rows: int, keys: Sequence[Key], clock: Iterator[int]
    ) -> LiveState | None:
        """Return the state of a table that has the full blocks `path` of `keys` and `rows` rows after them."""
        if self.marks is None:
            return None
        size = self._index.block_size
        _, mark = self.marks.resume([self._index.root, *path], len(path) * size + rows, keys, rows > 0)
        return self.marks.open(mark, next(clock), self.fork(keys))

    def fork(self, keys: Sequence[Key]) -> int:
        """Return how many of the rows `keys` are known, whatever states there are: see `LiveState.fork`."""
        known = self._index.chain(keys)
        _, more = self._index.go_on(known, keys)
        return len(known) * self._index.block_size + more

    def plan(self, table: BlockTable, plan: StatePlan) -> None:
        """Plan the states of the next step of `table` (see `Marks.plan`). Raises OutOfBlocksError without a slot."""
        if self.marks is None:
            return
        self._eviction.spared()  # says which marks go last
        if not self.marks.plan(table, plan):
            raise OutOfBlocksError

    def adopt(
        self, table: BlockTable, idle: bool, fill: Callable[[int, Sequence[int]], None], fork: int = 0
    ) -> None:
        """Give `table`, which has rows and no state, the state after them, and the rows of the log that go with it.

        `fill` writes both: it gets the slot of the state, and of the last blocks of the table, in which those rows lie,
        the ids, or NONE for one that is in the log. Raises OutOfBlocksError without room, and what `fill` raises; then
        there is no such state. `idle` is as in `BlockManager.reserve`, `fork` as in `LiveState`.
        """
        marks = self.marks
        assert marks is not None
        self._eviction.spared()
        if not marks.adopt(table, idle):
            raise OutOfBlocksError
        assert table.state is not None
        first = marks.first(table.length)
        blocks = table.blocks[first:]
        lacking = [block for block in blocks if block not in marks.log]
        for block in blocks:
            if block in marks.log:
                marks.log.hold(block)
        try:
            if len(lacking) > marks.log.room(idle):
                raise OutOfBlocksError
            for block in lacking:
                marks.log.take(block)
            places = [block if block in lacking else NONE for block in blocks]
            fill(table.state.slot, places)
        except BaseException:
            for block in blocks:
                if block in marks.log:
                    marks.log.release(block, 0)
            for block in lacking:
                marks.log.drop(block)
            self.close(table, 0)
            raise
        table.firsts[self._groups.pools.index(marks.log)] = first
        table.state.target, table.state.fork = NONE, fork

    def settle(self, table: BlockTable, clock: Iterator[int]) -> None:
        """Note that rows of `table` were committed."""
        if self.marks is not None and self.marks.settle(
            table, lambda row: self._place(table, row), next(clock)
        ):
            self._eviction.note_change()

    def close(self, table: BlockTable, now: int) -> None:
        """Make a mark of the state of a table that ends."""
        if self.marks is not None and self.marks.close(table, lambda row: self._place(table, row), now):
            self._eviction.note_change()

    def leave(self, block: Block, parent: Block | None) -> None:
        """Give up the marks of a block that has left the tree or has fewer rows, where no other block has them."""
        if self.marks is not None:
            self.marks.leave(block, parent)

    def _place(self, table: BlockTable, row: int) -> Place:
        """Return where a mark at a row of `table` hangs."""
        index, rest = divmod(row, self._index.block_size)
        parent = self._blocks[table.blocks[index - 1]] if index else self._index.root
        return parent, tuple(self._blocks[table.blocks[index]].keys[:rest]) if rest else ()

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Raise AssertionError unless what `tables` (all open ones) hold agrees with the slots."""
        if self.marks is not None:
            self.marks.check(tables)
