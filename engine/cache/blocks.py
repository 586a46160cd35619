"""The KV blocks as sequences use them. Pure Python, no tensors; `prefix_index.py` has their rows.

A block is free (in the free list), cached (no table holds it, but the index can find it) or held (in the tables of
`refs` holders). A holder of a block holds all blocks before it, so evicting leaves first never breaks a path.

When room is needed, cached blocks are evicted one by one (`engine/cache/eviction.py`). A sequence that needs evicted
rows computes them again, or brings back the copy that a host memory tier, if there is one, took when the block was
evicted (`engine/cache/host_paths.py`).

If every layer has a window (`engine/cache/window.py`), a table holds only the blocks that its next row sees.

A change of blocks and the copies that it needs are one operation: rows are copied before the index or the tier shows
them. If a copy fails, the error is raised and the blocks taken for the copy are released.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, repeat
from sys import maxsize

from engine.cache.block import GONE, Block, Key
from engine.cache.block_checks import table_refs
from engine.cache.block_pool import BlockPool
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.copies import Copy, Restore, RowCopy
from engine.cache.eviction import Eviction
from engine.cache.group_pool import GroupPool
from engine.cache.groups import Groups
from engine.cache.host_paths import FoundPath, HostPaths
from engine.cache.marks import Marks
from engine.cache.offload import HostTier, Offloaded
from engine.cache.prefix_index import PrefixIndex
from engine.cache.table_states import TableStates
from engine.cache.window import Window


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` rows. Not thread-safe: it belongs to the engine's loop."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        carry_out: Callable[[Copy], None] = lambda copy: None,
        tier: HostTier | None = None,
        window: Window | None = None,
        pools: Sequence[GroupPool] = (),
        marks: Marks | None = None,
    ) -> None:
        """`carry_out` copies rows before anything enqueued later reads or writes them; an error from it ends the
        operation. `tier` takes evicted blocks; without one they are lost. `window` is that of the network, if any;
        `pools` belong to `engine/cache/groups.py`, `marks` to recurrent layers. Raises ValueError unless both numbers
        are at least 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block(id) for id in range(num_blocks)]
        self.window = window
        self.blank = num_blocks
        """The blank block, which stands in a table for the blocks it has released; nothing writes to it."""
        self.groups = Groups(pools, block_size, marks)
        self.index = PrefixIndex(self._blocks, block_size, window, self.groups)
        self._eviction = Eviction(self.index, self.groups)
        self.marks = marks
        self.states = TableStates(self.groups, self.index, self._blocks, self._eviction)
        self._clock = count(1)
        self._tables: list[BlockTable] = []
        self.carry_out = carry_out
        self.tier = HostTier() if tier is None else tier
        self._host = HostPaths(self.tier, self.index, self.groups, lambda copy: self.carry_out(copy))
        self._pool = BlockPool(self._blocks, self.index, self.groups, self._eviction, self.states, self._host)

    # -- figures

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that no table holds but the index can find; they can be evicted."""
        return self._pool.num_cached

    @property
    def num_held(self) -> int:
        """Blocks in at least one open table."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def is_filling(self) -> bool:
        """Whether half of the blocks, of a group's slots or of those of states are taken: soon some will be lost."""
        room = [(self.num_free, self.num_blocks)]
        room += [(pool.num_free, pool.num_slots) for pool in self.groups.pools]
        if self.marks is not None:
            room.append((self.marks.num_free, self.marks.num_slots))
        return any(free < slots // 2 for free, slots in room)

    def blocks_for(self, rows: int) -> int:
        """Return how many blocks `rows` rows take."""
        return -(-rows // self.block_size)

    @property
    def every(self) -> Sequence[Block]:
        """Every block in the order of the ids, for reading only."""
        return self._blocks

    def path(self, keys: Sequence[Key]) -> list[int]:
        """Return the ids of the blocks of the longest cached prefix of `keys`, in order; blank for those gone."""
        path, partial, _ = self.index.find(keys)
        blocks = path if partial is None else [*path, partial]
        return [self.blank if block.is_gone else block.id for block in blocks]

    def pin(self, keys: Sequence[Key]) -> None:
        """Mark `keys`, present or not, as the conversation in use: evicted last, and never for idle work.

        It replaces the one marked before.
        """
        self._eviction.pin(keys)

    def keep(self, name: str, keys: Sequence[Key] | None) -> None:
        """Keep the path of `keys`, present or not, under a name: it is evicted after everything but the conversation in
        use, and never for idle work. It replaces the path with that name; None removes that path."""
        self._eviction.keep(name, keys)

    # -- the life of a table

    def match(self, keys: Sequence[Key], group_since: int = maxsize) -> int:
        """Return how many leading rows of `keys` are present, here or in the host tier; `group_since` as in `open`.
        Changes nothing."""
        return self._host.length(self._host.find(keys, group_since=group_since))

    def room(self, idle: bool = False) -> int:
        """Return how many blocks can be had, cached ones included. `idle`: as in `reserve`."""
        return self._pool.room(idle)

    def fits_beside(self, keys: Sequence[Key], rows: int, others: Sequence[tuple[BlockTable, int]]) -> bool:
        """Return whether a table of `rows` rows that begins with `keys` has room beside `others`: tables with the rows
        that they will have, which get one more block each."""

        def most(rows: int) -> int:
            return self.window.most_held(rows, self.block_size) if self.window else self.blocks_for(rows)

        path, _, _ = self.index.find(keys)
        needed = most(rows) - sum(block.refs > 0 for block in path[self.index.first(len(path)) :])
        for table, more in others:
            needed += max(most(more) + 1 - (len(table.blocks) - table.first), 0)
        has_state = self.states.fit(1 + len(others))
        return (
            has_state
            and needed <= self.room()
            and self.groups.fit([block.id for block in path], rows, others)
        )

    def open(
        self, keys: Sequence[Key], idle: bool = False, since: int = maxsize, group_since: int = maxsize
    ) -> BlockTable:
        """Return a new table that holds the longest cached prefix of `keys`. `idle`: as in `reserve`.

        Blocks in the host tier are brought back. If a block matches only in part, or a holder may still write to it,
        its matching rows are copied into a fresh block. If it would be evicted to make room for that, it is itself cut
        to these rows. Without room for either, the prefix ends before it. The rows from `since` on are present and
        held, whatever the window, and those from `group_since` on in every group. Raises what `carry_out` raises; then
        there is no table.
        """
        table = self._open(keys, idle, since, group_since)
        if table is None:
            table = self._open(keys, idle, since, group_since, in_host=False)
        assert table is not None
        return table

    def _open(
        self, keys: Sequence[Key], idle: bool, since: int, group_since: int, in_host: bool = True
    ) -> BlockTable | None:
        """Do what `open` does; return None if not all could be brought back that is needed to go on."""
        found = self._host.find(keys, since, group_since, in_host)
        first = self.index.first(len(found.path), since)
        held = found.path[first:]
        for block in held:
            self._pool.hold(block)
        blocks = [self.blank] * first + [block.id for block in held]
        state = self.states.open(found.path, found.rows, keys, self._clock) if found.states is None else None
        firsts = self.groups.firsts(found.blocks, group_since, state)
        behind = [max(first, len(blocks)) for first in firsts]
        rows = len(blocks) * self.block_size
        table = BlockTable(blocks, rows, first, since, group_since, behind, state)
        self._tables.append(table)
        self.tier.touch([block for block, _ in found.offloaded])
        try:
            is_whole = self._hold_groups(table, found, firsts, idle)
            if is_whole and not self._bring_back(table, found.offloaded, idle):
                self._continue(table, found.partial, found.rows, idle)
            if is_whole and found.states is not None:
                is_whole = self._host.bring_states(table, found, self.states, keys, idle)
        except BaseException:
            self.close(table)
            raise
        rows = table.length
        if self.groups and not (is_whole and rows >= found.blocks * self.block_size):
            self.close(table)
            return None
        if state is not None and state.row > rows:  # its mark lies in rows that there was no room to copy
            self.close(table)
            return self.open(keys[:rows], idle, since, group_since)
        return table

    def reserve(self, table: BlockTable, rows: int, idle: bool = False, is_bare: bool = False) -> None:
        """Make room for `rows` more rows in `table`, evicting cached blocks if necessary.

        `idle`: for idle work, which may not evict pinned or kept paths. `is_bare`: without slots in the groups; then
        `table` must not be read before all that those see has slots. Raises OutOfBlocksError without room, and what
        `carry_out` raises; `table` is then unchanged.
        """
        before = len(table.blocks)
        missing = self.blocks_for(table.length + rows) - before
        if not self._pool.has_room(table, missing, idle, is_bare):
            raise OutOfBlocksError
        if is_bare:
            self.groups.skip(table, before + missing, next(self._clock))
        try:
            for _ in range(missing):
                table.blocks.append(self._pool.take(table))
        except BaseException:
            self._cut_table(table, before)
            raise

    def go_along(self, table: BlockTable, keys: Sequence[Key]) -> None:
        """Continue `table`, which has whole blocks, with the next full blocks of `keys` in the cache, whatever they
        lack in the groups, as after `reserve(is_bare=True)`. It has no state from then on."""
        self.states.close(table, next(self._clock))
        path = self.index.chain(keys)
        self.groups.skip(table, len(path), next(self._clock))
        for block in path[len(table.blocks) :]:
            self._pool.hold(block)
            table.blocks.append(block.id)
        table.length = len(path) * self.block_size

    def commit(self, table: BlockTable, keys: Iterable[Key], origins: Iterable[int] = repeat(0)) -> None:
        """Note that the next rows of `table` are written (or will be, before they are read), and their origins.

        From now on they can be found. A block that becomes equal to a known one is replaced by it in the table, so
        that equal paths share their blocks.
        """
        for key, origin in zip(keys, origins, strict=False):
            index, row = divmod(table.length, self.block_size)
            block = self._blocks[table.blocks[index]]
            if row == 0:
                before = self._blocks[table.blocks[index - 1]] if index else self.index.root
                self.index.link(block, before)
            block.keys.append(key)
            block.origins.append(origin)
            table.length += 1
            if row == self.block_size - 1:
                self._complete(table, index)
        self.states.settle(table, self._clock)
        self._slide(table)

    def trim(self, table: BlockTable) -> None:
        """Release the blocks of `table` in which no row is written."""
        self._cut_table(table, self.blocks_for(table.length))

    def close(self, table: BlockTable) -> None:
        """Release every block of `table`; the rows written stay in the cache until they are evicted."""
        self._tables.remove(table)
        now = next(self._clock)
        self.states.close(table, now)
        self.groups.close(table, now)
        for id in table.blocks[table.first :]:
            self._blocks[id].last_used = now
            self._pool.release(self._blocks[id])
        table.blocks.clear()
        table.length = table.first = 0
        self._eviction.note_change()  # some of the blocks may be on a kept path

    def along(self, table: BlockTable) -> list[Block]:
        """Return the blocks of all rows of `table`, in order, including those that it has released."""
        if not table.length:
            return []
        return self.index.path_to(self._blocks[table.blocks[(table.length - 1) // self.block_size]])

    def origins(self, table: BlockTable) -> list[int]:
        """Return the origin of each row of `table`."""
        return [origin for block in self.along(table) for origin in block.origins]

    def forget(self, keys: Sequence[Key], start: int) -> int:
        """Forget the rows of the path of `keys` from row `start` on, here and in the host tier.

        Blocks that a table holds or that other paths share stay. Return how many blocks were freed.
        """
        path = self.index.chain(keys)
        partial, rows = self.index.go_on(path, keys)
        self.tier.forget(self._host.follow(path, keys), self.blocks_for(start) - len(path))
        if partial is not None and rows == len(partial.keys):
            path.append(partial)  # the path's own tail, not a block of another branch
        freed = 0
        while path:
            block = path.pop()
            if block.parent is None:
                continue  # it was gone, and was pruned with the block after it
            kept = max(start - len(path) * self.block_size, 0)
            if kept >= len(block.keys) or block.refs or block.children:
                break
            if not self.tier.remove(*self._host.identity(block)):
                break
            if kept and not self.index.begins_another(block, kept):
                self.index.shorten(block, kept)
                self.states.leave(block, block.parent)
                self._eviction.note_change()
                break
            self._pool.evict(block, offload=False)
            freed += 1
        return freed

    def evict_all(self) -> int:
        """Free every cached block, and empty the host tier. Return how many blocks were freed."""
        self.tier.clear()
        freed = self.num_cached
        while self.num_cached:
            self._pool.evict_next(offload=False)
        return freed

    # -- rows

    def _hold_groups(self, table: BlockTable, found: FoundPath, firsts: Sequence[int], idle: bool) -> bool:
        """Hold the slots of a new table from `firsts` on; bring back those lost. Return False if there is no room."""
        if self.groups:
            self._eviction.spared()  # says which slots go last
        return self.groups.open(
            table,
            firsts,
            next(self._clock),
            lambda group, index: self._host.fill(found.path[index], group, idle),
        )

    def _bring_back(self, table: BlockTable, offloaded: Sequence[tuple[Offloaded, int]], idle: bool) -> bool:
        """Continue `table` with offloaded blocks as far as there is room. Return False if there is no room at all."""
        start = table.length
        for block, rows in offloaded:
            if not self._pool.has_room(table, 1, idle):
                break
            groups = [0, *self.groups.next(table)]
            id = self._pool.take(table)
            if not all(group in block.slots for group in groups):  # they went to what made room
                self._pool.give_back(id)
                break
            try:
                copies = [Restore(block.slots[group], id, group) for group in groups]
                self._append(table, id, copies, block.keys[:rows])
            except BaseException:
                self.tier.drop(block)  # if it cannot be brought back, it is computed next time
                raise
            self.tier.restored_rows += rows
        return table.length > start

    def _continue(self, table: BlockTable, source: Block | None, rows: int, idle: bool) -> None:
        """Continue `table` with the first `rows` rows of `source`: the block itself, or a copy if there is room."""
        if source is None or source.is_gone:  # the attempt before may have evicted it
            return
        is_alone = source.refs == 0 and not source.children and rows == len(source.keys)
        if is_alone or self.groups:
            self._continue_holding(table, source, rows, idle, is_alone)
        elif self._pool.has_room(table, 1, idle):
            place, keys, origins = source.id, source.keys[:rows], source.origins[:rows]
            id = self._pool.take(table)
            # If the source itself is evicted for the copy, its rows are already in place.
            copies = [] if id == place else [RowCopy(place, id, rows)]
            self._append(table, id, copies, keys, origins)

    def _continue_holding(
        self, table: BlockTable, source: Block, rows: int, idle: bool, is_alone: bool
    ) -> None:
        """Continue `table` with `source`, or a copy, if there is room for it and the slots it lacks."""
        self._pool.hold(source)
        with ExitStack() as undone:
            undone.callback(self._pool.release, source)
            groups = self.groups.next(table)
            if not self.groups.hold(
                source.id,
                groups,
                source.last_used,
                undone,
                lambda group: self._host.fill(source, group, idle),
            ):
                return
            if is_alone:
                undone.pop_all()
                self.groups.leave_out(table, groups)
                table.blocks.append(source.id)
                table.length += rows
                return
            if self._pool.has_room(table, 1, idle):
                id = self._pool.take(table)
                copy = RowCopy(source.id, id, rows)
                self._append(table, id, [copy], source.keys[:rows], source.origins[:rows])

    def _append(
        self,
        table: BlockTable,
        id: int,
        copies: Iterable[Copy],
        keys: Iterable[Key],
        origins: Iterable[int] = repeat(0),
    ) -> None:
        """Continue `table` with the fresh block `id`, filled by `copies` with rows `keys`; release it on failure."""
        try:
            for copy in copies:
                self.carry_out(copy)
        except BaseException:
            self._pool.give_back(id)
            raise
        table.blocks.append(id)
        self.commit(table, keys, origins)

    def _cut_table(self, table: BlockTable, blocks: int) -> None:
        """Release all but the first `blocks` blocks; those released have no rows."""
        self.groups.cut(table, blocks)
        for id in table.blocks[blocks:]:
            self._pool.release(self._blocks[id])
        del table.blocks[blocks:]

    def _slide(self, table: BlockTable) -> None:
        """Release the blocks that no later row sees; they stay cached, to be evicted in the order of their rows."""
        self.groups.slide(table, partial(next, self._clock))
        first = self.index.first(table.length // self.block_size, table.since)
        for index in range(table.first, first):
            block = self._blocks[table.blocks[index]]
            block.last_used = next(self._clock)
            self._pool.release(block)
            table.blocks[index] = self.blank
            self._eviction.note_change()
        table.first = max(first, table.first)

    def _complete(self, table: BlockTable, index: int) -> None:
        block = self._blocks[table.blocks[index]]
        known = self.index.complete(block)
        if known is block:
            block.name = self.tier.name(*self._host.identity(block)[1:])
            return
        if known.is_gone:  # its rows are present again
            known.id, known.refs, known.origins = block.id, block.refs, block.origins.copy()
            self._blocks[known.id], block.id, block.refs = known, GONE, 0
            self._eviction.forget(block)
            self.index.prune(block)
            return
        self._pool.hold(known)
        self.groups.merge(table, index, known.id)
        table.blocks[index] = known.id
        block.refs -= 1
        self._pool.drop(block)

    # -- invariants

    def check(self) -> None:
        """Raise AssertionError unless every invariant of this module's docstring holds."""
        refs = table_refs(self._tables, self._blocks, self.index, self.blank)
        self.groups.check(self._tables)
        self.states.check(self._tables)
        self._pool.check(refs)
        self._eviction.check(self._blocks)
        self.index.check()
        self.tier.check([self._host.identity(block) for block in self._blocks if block.indexed])
