"""Who holds which KV block, and which is evicted. Pure Python, no tensors. (What is in them: `prefix_index.py`.)

A block is free (in the free list), cached (nobody holds it, the index can find it) or held (in the tables of
`refs` holders). A holder of a block holds all blocks before it, so evicting leaves first never breaks a path.

Where room is needed, one cached leaf after the other is evicted by this rule:

1. of the leaves off the path that `pin` named, the conversation in use, the one that was used longest ago;
2. when there are none, the end of that path, but never for idle work.

So other branches go before what the branches share, the conversation shrinks from its end, and the system prompt,
where every path begins, goes last. Who finds too little computes it again, or, where there is a tier in host memory
(`engine/cache/offload.py`), brings back what was copied there when it was evicted.

A change of blocks and the copies that it takes are one operation: rows are copied before the index or the tier tells
of them, and where a copy fails the error is raised and the blocks that were taken for it are given back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat

from engine.cache.min_set import MinSet
from engine.cache.offload import ROOT_NAME, HostTier, Offload, Offloaded, Restore
from engine.cache.prefix_index import ROOT, Block, Key, PrefixIndex


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free or can be evicted; nothing was changed."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that one holder holds, in order. `length` rows of them are written."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows to copy, from the start of one block to the start of another."""

    source: int
    target: int
    rows: int


Copy = RowCopy | Offload | Restore


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` rows. Not thread-safe: it belongs to the engine's loop."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        carry_out: Callable[[Copy], None] = lambda copy: None,
        tier: HostTier | None = None,
    ) -> None:
        """`carry_out` copies rows, before anything that is enqueued later reads or writes them; what it raises ends
        the operation. `tier` takes what is evicted; without one it is gone.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block(id) for id in range(num_blocks)]
        self._free = MinSet(range(num_blocks))
        self._index = PrefixIndex(self._blocks, block_size)
        self._leaves: MinSet[tuple[int, int]] = MinSet()
        """(last_used, id) of the blocks that can be evicted: cached, without children."""
        self._cached = 0
        self._clock = count(1)
        self._tables: list[BlockTable] = []
        self._in_use: Sequence[Key] = ()
        self._pinned: set[int] | None = set()
        self.carry_out = carry_out
        self.tier = HostTier() if tier is None else tier

    # -- figures

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but the index can find; they can be evicted."""
        return self._cached

    @property
    def num_held(self) -> int:
        """Blocks in at least one open table."""
        return self.num_blocks - len(self._free) - self._cached

    def blocks_for(self, rows: int) -> int:
        """How many blocks `rows` rows fill."""
        return -(-rows // self.block_size)

    @property
    def every(self) -> Sequence[Block]:
        """Every block in the order of the ids, to look at."""
        return self._blocks

    def path(self, keys: Sequence[Key]) -> list[int]:
        """The blocks in which the longest cached prefix of `keys` stands, in order."""
        path, partial, _ = self._index.find(keys)
        return path if partial is None else [*path, partial]

    def pin(self, keys: Sequence[Key]) -> None:
        """The path of `keys` is the conversation in use: evicted last, and by no idle work. It need not be present.

        It takes the place of the path that was named before.
        """
        self._in_use = list(keys)
        self._pinned = None

    # -- the life of a table

    def match(self, keys: Sequence[Key]) -> int:
        """How many leading rows of `keys` are present, here or in the host tier. Changes nothing."""
        path, _, rows = self._index.find(keys)
        offloaded = sum(rows for _, rows in self._offloaded(path, keys))
        return len(path) * self.block_size + max(rows, offloaded)

    def room(self, idle: bool = False) -> int:
        """How many blocks can be had, those of cached rows included. `idle`: as in `reserve`."""
        spared = sum(self._blocks[id].refs == 0 for id in self._pinned_blocks()) if idle else 0
        return len(self._free) + self._cached - spared

    def needs(self, keys: Sequence[Key], rows: int) -> int:
        """How many blocks of `room` a table of `rows` rows that begins with `keys` takes: those that nobody holds."""
        path, _, _ = self._index.find(keys)
        return self.blocks_for(rows) - sum(self._blocks[id].refs > 0 for id in path)

    def open(self, keys: Sequence[Key], idle: bool = False) -> BlockTable:
        """A new table that holds the longest cached prefix of `keys`. `idle`: as in `reserve`.

        What the host tier has of it is brought back. The matching part of a block that goes on differently, or that
        somebody else may still write, is copied into a fresh block. Where no block can be had for such a copy, the
        prefix just ends before it. Raises what `carry_out` raises; then there is no table.
        """
        path, partial, rows = self._index.find(keys)
        offloaded = self._offloaded(path, keys)
        for id in path:
            self._hold(id)
        table = BlockTable(path, len(path) * self.block_size)
        self._tables.append(table)
        try:
            if sum(rows for _, rows in offloaded) <= rows or not self._bring_back(table, offloaded, idle):
                self._continue(table, partial, rows, idle)
        except BaseException:
            self.close(table)
            raise
        return table

    def reserve(self, table: BlockTable, rows: int, idle: bool = False) -> None:
        """Make room for `rows` more rows in `table`, evicting cached blocks where needed.

        `idle`: nobody waits for them, so the conversation in use is left alone. Raises OutOfBlocksError when there is
        no room, and what `carry_out` raises; `table` is then as it was.
        """
        before = len(table.blocks)
        missing = self.blocks_for(table.length + rows) - before
        if not self._has_room(missing, idle):
            raise OutOfBlocksError
        try:
            for _ in range(missing):
                table.blocks.append(self._take(table.blocks[-1] if table.blocks else ROOT))
        except BaseException:
            self._cut_table(table, before)
            raise

    def commit(self, table: BlockTable, keys: Iterable[Key], origins: Iterable[int] = repeat(0)) -> None:
        """Note that the next rows of `table` are written (or will be, before anyone else reads them), and for whom.

        From now on they can be found. A block that becomes equal to one already known is replaced by it in the
        table, so that equal paths share their blocks.
        """
        for key, origin in zip(keys, origins, strict=False):
            index, row = divmod(table.length, self.block_size)
            block = self._blocks[table.blocks[index]]
            if row == 0:
                self._index.link(block, table.blocks[index - 1] if index else ROOT)
            block.keys.append(key)
            block.origins.append(origin)
            table.length += 1
            if row == self.block_size - 1:
                self._complete(table, index)

    def close(self, table: BlockTable) -> None:
        """Let go of every block of `table`; what was written stays as cache until it is evicted."""
        self._tables.remove(table)
        now = next(self._clock)
        for id in reversed(table.blocks):
            self._blocks[id].last_used = now
            self._release(id)
        table.blocks.clear()
        table.length = 0
        self._pinned = None  # some of them may be on the path that is pinned

    def origins(self, table: BlockTable) -> list[int]:
        """For each row of `table` who had it computed."""
        return [origin for id in table.blocks for origin in self._blocks[id].origins]

    def forget(self, keys: Sequence[Key], start: int) -> int:
        """Forget the rows of the path of `keys` from row `start` on, here and in the host tier.

        Blocks that somebody holds, or that other paths go through, stay. Returns how many blocks were freed.
        """
        path, partial, _ = self._index.find(keys)
        self.tier.forget(self._offloaded(path, keys), self.blocks_for(start) - len(path))
        if partial is not None:
            tail = self._blocks[partial].keys
            if list(keys[len(path) * self.block_size :][: len(tail)]) == tail:
                path.append(partial)  # the path's own tail; a block of another branch is none of ours
        freed = 0
        while path:
            block = self._blocks[path.pop()]
            kept = max(start - len(path) * self.block_size, 0)
            if kept >= len(block.keys) or block.refs or block.children:
                break
            if not self.tier.remove(*self._identity(block)):
                break
            if kept and not self._index.begins_another(block, kept):
                self._index.shorten(block, kept)
                self._pinned = None
                break
            self._evict(block, offload=False)
            freed += 1
        return freed

    def evict_all(self) -> int:
        """Free every cached block, and empty the host tier. Returns how many blocks were freed."""
        self.tier.clear()
        freed = 0
        while self._cached:
            self._free_one(offload=False)
            freed += 1
        return freed

    # -- the host tier

    def _name(self, id: int) -> int:
        return ROOT_NAME if id == ROOT else self._blocks[id].name

    def _identity(self, block: Block) -> tuple[int, int, tuple[Key, ...]]:
        return block.name, self._name(block.parent), tuple(block.keys)

    def _offloaded(self, path: Sequence[int], keys: Sequence[Key]) -> list[tuple[Offloaded, int]]:
        """What the host tier has of `keys` after the blocks of `path`, and how many rows of each."""
        rest = keys[len(path) * self.block_size :]
        return self.tier.follow(self._name(path[-1] if path else ROOT), rest, self.block_size)

    def _bring_back(self, table: BlockTable, offloaded: Sequence[tuple[Offloaded, int]], idle: bool) -> bool:
        """Continue `table` with offloaded blocks as far as there is room. False where there is none at all."""
        start = table.length
        self.tier.touch(offloaded)
        for block, rows in offloaded:
            if not self._has_room(1, idle):
                break
            id = self._take(table.blocks[-1] if table.blocks else ROOT)
            if block.slot < 0:  # the block that made room has taken it
                self._release(id)
                break
            try:
                self._append(table, id, Restore(block.slot, id), block.keys[:rows])
            except BaseException:
                self.tier.drop(block)  # what cannot be brought back is computed the next time
                raise
            self.tier.restored_rows += rows
        return table.length > start

    # -- rows

    def children(self, parent: int) -> set[int]:
        """The blocks that follow a block, or begin a path for ROOT. Not to be changed."""
        return self._index.children(parent)

    def _continue(self, table: BlockTable, partial: int | None, rows: int, idle: bool) -> None:
        """Continue `table` with the first `rows` rows of `partial`: the block itself, or a copy if there is room."""
        if partial is None:
            return
        source = self._blocks[partial]
        in_place = source.refs == 0 and not source.children and rows == len(source.keys)
        self._hold(partial)
        if in_place:
            table.blocks.append(partial)
            table.length += rows
            return
        try:
            if self._has_room(1, idle):
                id = self._take(partial)
                self._append(table, id, RowCopy(partial, id, rows), source.keys[:rows], source.origins)
        finally:
            self._release(partial)

    def _append(
        self, table: BlockTable, id: int, copy: Copy, keys: Iterable[Key], origins: Iterable[int] = repeat(0)
    ) -> None:
        """Continue `table` with the fresh block `id`, of which `copy` fills the rows `keys`; else give it back."""
        try:
            self.carry_out(copy)
        except BaseException:
            self._release(id)
            raise
        table.blocks.append(id)
        self.commit(table, keys, origins)

    def _cut_table(self, table: BlockTable, blocks: int) -> None:
        """Give back all but the first `blocks` blocks; the others are not written."""
        for id in table.blocks[blocks:]:
            self._release(id)
        del table.blocks[blocks:]

    def _complete(self, table: BlockTable, index: int) -> None:
        block = self._blocks[table.blocks[index]]
        known = self._index.complete(block)
        if known == block.id:
            block.name = self.tier.name(self._name(block.parent), tuple(block.keys))
            return
        self._hold(known)
        table.blocks[index] = known
        block.refs -= 1
        self._drop(block)

    # -- holding, releasing, evicting

    def _has_room(self, blocks: int, idle: bool) -> bool:
        return blocks <= len(self._free) or blocks <= self.room(idle)

    def _pinned_blocks(self) -> set[int]:
        """The blocks of the conversation in use, looked up when somebody needs room and they may have changed."""
        if self._pinned is None:
            self._pinned = set(self.path(self._in_use))
        return self._pinned

    def _hold(self, id: int) -> None:
        block = self._blocks[id]
        if block.refs == 0:
            self._cached -= 1
            self._leaves.discard((block.last_used, id))
        block.refs += 1

    def _release(self, id: int) -> None:
        block = self._blocks[id]
        block.refs -= 1
        if block.refs:
            return
        if not block.keys:
            self._drop(block)
            return
        self._cached += 1
        self._offer(block)

    def _offer(self, block: Block) -> None:
        if block.refs == 0 and not block.children:
            self._leaves.add((block.last_used, block.id))

    def _take(self, after: int) -> int:
        """A fresh block, next to `after` where possible: contiguous blocks can be read without gathering."""
        if not self._free:
            self._free_one(offload=True)
        id = after + 1 if after + 1 in self._free else self._free.smallest()
        self._free.discard(id)
        self._blocks[id].refs = 1
        return id

    def _free_one(self, offload: bool) -> None:
        """Evict the leaf whose turn it is (see above). There must be one, or for idle work one off the pinned path.

        `offload`: the host tier gets it.
        """
        _, id = first = self._leaves.smallest()
        if id in self._pinned_blocks():  # a path has one leaf
            _, id = self._leaves.smallest(besides=first)
        self._evict(self._blocks[id], offload)

    def _evict(self, block: Block, offload: bool) -> None:
        if offload:
            self.tier.put(*self._identity(block), lambda slot: self.carry_out(Offload(block.id, slot)))
        self._cached -= 1
        self._leaves.discard((block.last_used, block.id))
        self._drop(block)

    def _drop(self, block: Block) -> None:
        """Take a block that nobody holds out of the tree and put it into the free list."""
        parent = block.parent
        self._index.remove(block)
        if parent != ROOT:
            self._offer(self._blocks[parent])
        if self._pinned:
            self._pinned.discard(block.id)
        self._free.add(block.id)

    # -- invariants

    def check(self) -> None:
        """Raise AssertionError unless every invariant of this module's docstring holds."""
        refs = [0] * self.num_blocks
        for table in self._tables:
            assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
            assert self.blocks_for(table.length) <= len(table.blocks), "a table claims rows without a block"
            parent = ROOT
            for index, id in enumerate(table.blocks):
                refs[id] += 1
                block = self._blocks[id]
                rows = min(max(table.length - index * self.block_size, 0), self.block_size)
                assert len(block.keys) == rows, (
                    f"block {id} of a table has {len(block.keys)} rows, not {rows}"
                )
                if rows:
                    assert block.parent == parent, f"block {id} does not follow block {parent}"
                if rows < self.block_size:
                    assert block.refs == 1, f"writable block {id} is shared"
                parent = id
        cached = 0
        for block in self._blocks:
            assert block.refs == refs[block.id], (
                f"block {block.id} counts {block.refs} holders, not {refs[block.id]}"
            )
            free = block.id in self._free
            assert not (free and block.refs), f"block {block.id} is both free and held"
            assert free or block.refs or block.keys, f"block {block.id} is lost"
            assert not (free and block.keys), f"free block {block.id} has rows"
            cached += bool(block.keys) and block.refs == 0
            for child in block.children:
                assert block.refs or not self._blocks[child].refs, f"block {child} is held but not its parent"
        leaves = {(b.last_used, b.id) for b in self._blocks if b.keys and not b.refs and not b.children}
        assert set(self._leaves) == leaves, "a leaf cannot be evicted, or what is no cached leaf can"
        assert not (self._pinned or set()) & set(self._free), "a free block is taken for one that is pinned"
        assert cached == self._cached, f"{self._cached} blocks are counted as cached, there are {cached}"
        self._index.check()
        self.tier.check([self._identity(block) for block in self._blocks if block.indexed])
