"""Which KV block holds what: ids, reference counts, the prefix index, eviction. Pure Python, no tensors.

The prefix index is a tree. A node is a block; its children continue its rows. A full block is found by
`(parent block, keys of its rows)`: the parent stands for everything before it, so the lookup is a hash chained
from the start whose hits are compared key by key (a dict does both). The last, partly filled block of a path is
a leaf and is found by comparing rows.

    root -- [a b c d] -- [e f g h] -- [i j]          a path and its unfinished tail
                     \\-- [e f x y]                   a branch: "e f" was copied on write

A block is free (in the free list), cached (nobody holds it, the index can find it) or held (in the tables of
`refs` holders). A holder of a block holds all blocks before it, so evicting leaves first never breaks a path.

Where room is needed, one cached leaf after the other is evicted by this rule:

1. of the leaves off the path that `keep` named, the conversation in use, the one that was used longest ago;
2. when there are none, the end of that path, but never for idle work.

So other branches go before what the branches share, the conversation shrinks from its end, and the system prompt,
where every path begins, goes last. Who finds too little computes it again.
"""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

Key = Hashable
"""What identifies the KV of one row, given the rows before it: a token id, or more where the row was computed
with something in view that is no longer in the table (see `engine/rows.py`)."""

ROOT = -1


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free or can be evicted; nothing was changed."""


@dataclass(slots=True)
class Block:
    """One block. `keys[i]` is the key of row i; a row without a key has not been written."""

    id: int
    refs: int = 0
    parent: int = ROOT
    keys: list[Key] = field(default_factory=list)
    children: set[int] = field(default_factory=set)
    indexed: bool = False
    last_used: int = 0


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that one holder holds, in order. `length` rows of them are written."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows to copy, from the start of one block to the start of another, before the next write."""

    source: int
    target: int
    rows: int


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` rows. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block(id) for id in range(num_blocks)]
        self._free = set(range(num_blocks))
        self._free_heap = list(range(num_blocks))
        self._roots: set[int] = set()
        self._full: dict[tuple[int, tuple[Key, ...]], int] = {}
        self._evictable: list[tuple[int, int]] = []
        self._cached = 0
        self._clock = count(1)
        self._tables: list[BlockTable] = []
        self._in_use: Sequence[Key] = ()
        self._kept: set[int] | None = set()

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
        path, partial, _ = self._find(keys)
        return path if partial is None else [*path, partial]

    def keep(self, keys: Sequence[Key]) -> None:
        """The path of `keys` is the conversation in use: evicted last, and by no idle work. It need not be present.

        It takes the place of the path that was named before.
        """
        self._in_use = list(keys)
        self._kept = None

    # -- the life of a table

    def match(self, keys: Sequence[Key]) -> int:
        """How many leading rows of `keys` are present. Changes nothing."""
        path, partial, rows = self._find(keys)
        return len(path) * self.block_size + (rows if partial is not None else 0)

    def open(self, keys: Sequence[Key], idle: bool = False) -> tuple[BlockTable, list[RowCopy]]:
        """A new table that holds the longest cached prefix of `keys`. `idle`: as in `reserve`.

        The matching part of a block that goes on differently, or that somebody else may still write, is copied
        into a fresh block: do the copies returned before anything is written. Where no block can be had for
        such a copy, the prefix just ends before it.
        """
        path, partial, rows = self._find(keys)
        for id in path:
            self._hold(id)
        table = BlockTable(path, len(path) * self.block_size)
        self._tables.append(table)
        if partial is None:
            return table, []
        source = self._blocks[partial]
        if source.refs == 0 and not source.children and rows == len(source.keys):
            self._hold(partial)
            table.blocks.append(partial)
            table.length += rows
            return table, []
        self._hold(partial)
        try:
            if not self._has_room(1, idle):
                return table, []
            copy = self._take(after=partial)
        finally:
            self._release(partial)
        table.blocks.append(copy)
        self.commit(table, source.keys[:rows])
        return table, [RowCopy(partial, copy, rows)]

    def reserve(self, table: BlockTable, rows: int, idle: bool = False) -> None:
        """Make room for `rows` more rows in `table`, evicting cached blocks where needed.

        `idle`: nobody waits for them, so the conversation in use is left alone. Raises OutOfBlocksError, and changes
        nothing, when there is no room.
        """
        missing = self.blocks_for(table.length + rows) - len(table.blocks)
        if not self._has_room(missing, idle):
            raise OutOfBlocksError
        for _ in range(missing):
            table.blocks.append(self._take(after=table.blocks[-1] if table.blocks else ROOT))

    def commit(self, table: BlockTable, keys: Iterable[Key]) -> None:
        """Note that the next rows of `table` are written (or will be, before anyone else reads them).

        From now on they can be found. A block that becomes equal to one already known is replaced by it in the
        table, so that equal paths share their blocks.
        """
        for key in keys:
            index, row = divmod(table.length, self.block_size)
            block = self._blocks[table.blocks[index]]
            if row == 0:
                self._link(block, table.blocks[index - 1] if index else ROOT)
            block.keys.append(key)
            table.length += 1
            if row == self.block_size - 1:
                self._index_full(table, index)

    def truncate(self, table: BlockTable) -> None:
        """Give back the blocks that were reserved but not written."""
        for id in table.blocks[self.blocks_for(table.length) :]:
            self._release(id)
        del table.blocks[self.blocks_for(table.length) :]

    def fork(self, table: BlockTable) -> tuple[BlockTable, list[RowCopy]]:
        """A second table with the same rows. Full blocks are shared, an unfinished tail is copied.

        Raises OutOfBlocksError, and changes nothing, when no block is left for the tail.
        """
        full, rest = divmod(table.length, self.block_size)
        if rest and not self._has_room(1, idle=False):
            raise OutOfBlocksError
        twin = BlockTable(table.blocks[:full], full * self.block_size)
        for id in twin.blocks:
            self._hold(id)
        self._tables.append(twin)
        if not rest:
            return twin, []
        source = table.blocks[full]
        twin.blocks.append(self._take(after=source))
        self.commit(twin, self._blocks[source].keys)
        return twin, [RowCopy(source, twin.blocks[full], rest)]

    def close(self, table: BlockTable) -> None:
        """Let go of every block of `table`; what was written stays as cache until it is evicted."""
        self._tables.remove(table)
        now = next(self._clock)
        for id in reversed(table.blocks):
            self._blocks[id].last_used = now
            self._release(id)
        table.blocks.clear()
        table.length = 0
        self._kept = None  # some of them may be on the path that is kept

    def forget(self, keys: Sequence[Key], start: int) -> int:
        """Free the cached blocks on the path of `keys` that hold nothing before row `start`.

        Blocks that somebody holds, or that other paths go through, stay. Returns how many were freed.
        """
        path, partial, _ = self._find(keys)
        if partial is not None and len(path) * self.block_size + len(self._blocks[partial].keys) == len(keys):
            path.append(partial)  # the path's own tail; a block of another branch is none of ours
        freed = 0
        for index in range(len(path) - 1, -1, -1):
            block = self._blocks[path[index]]
            if index * self.block_size < start or block.refs or block.children:
                break
            self._evict(block)
            freed += 1
        return freed

    def evict_all(self) -> int:
        """Free every cached block. Returns how many were freed."""
        freed = 0
        while self._cached:
            self._free_one()
            freed += 1
        return freed

    # -- the index

    def _children(self, parent: int) -> set[int]:
        return self._roots if parent == ROOT else self._blocks[parent].children

    def _find(self, keys: Sequence[Key]) -> tuple[list[int], int | None, int]:
        """The full blocks of the longest cached prefix, and a block that has `rows` more of its rows."""
        path: list[int] = []
        parent, position = ROOT, 0
        while position + self.block_size <= len(keys):
            child = self._full.get((parent, tuple(keys[position : position + self.block_size])))
            if child is None:
                break
            path.append(child)
            parent = child
            position += self.block_size
        best, best_rank = None, (0, False)
        rest = keys[position : position + self.block_size]
        for child in self._children(parent):
            block = self._blocks[child]
            rows = _common_prefix(block.keys, rest)
            # Of equals, take one that can be used in place rather than copied.
            rank = (rows, block.refs == 0 and rows == len(block.keys))
            if rows and rank > best_rank:
                best, best_rank = child, rank
        return path, best, best_rank[0]

    def _link(self, block: Block, parent: int) -> None:
        block.parent = parent
        self._children(parent).add(block.id)

    def _index_full(self, table: BlockTable, index: int) -> None:
        block = self._blocks[table.blocks[index]]
        name = (block.parent, tuple(block.keys))
        known = self._full.get(name)
        if known is None:
            self._full[name] = block.id
            block.indexed = True
            return
        self._hold(known)
        table.blocks[index] = known
        self._blocks[block.id].last_used = next(self._clock)
        block.refs -= 1
        self._drop(block)

    # -- holding, releasing, evicting

    def _has_room(self, blocks: int, idle: bool) -> bool:
        if blocks <= len(self._free):
            return True
        spared = sum(self._blocks[id].refs == 0 for id in self._kept_blocks()) if idle else 0
        return blocks <= len(self._free) + self._cached - spared

    def _kept_blocks(self) -> set[int]:
        """The blocks of the conversation in use, looked up when somebody needs room and they may have changed."""
        if self._kept is None:
            self._kept = set(self.path(self._in_use))
        return self._kept

    def _hold(self, id: int) -> None:
        block = self._blocks[id]
        if block.refs == 0:
            self._cached -= 1
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
            heapq.heappush(self._evictable, (block.last_used, block.id))

    def _take(self, after: int) -> int:
        """A fresh block, next to `after` where possible: contiguous blocks can be read without gathering."""
        if not self._free:
            self._free_one()
        id = after + 1
        if id in self._free:
            self._free.remove(id)
        else:
            id = heapq.heappop(self._free_heap)
            while id not in self._free:
                id = heapq.heappop(self._free_heap)
            self._free.remove(id)
        self._blocks[id].refs = 1
        return id

    def _free_one(self) -> None:
        """Evict the leaf whose turn it is (see above). There must be one, or for idle work one off the kept path."""
        kept = self._kept_blocks()
        end_of_kept: Block | None = None  # a path has one leaf
        while self._evictable:
            last_used, id = heapq.heappop(self._evictable)
            block = self._blocks[id]
            if block.refs or not block.keys or block.children or block.last_used != last_used:
                continue  # that has changed since it was put there
            if id in kept:
                end_of_kept = block
                continue
            self._evict(block)
            if end_of_kept is not None:
                self._offer(end_of_kept)
            return
        assert end_of_kept is not None, "nothing can be evicted"
        self._evict(end_of_kept)

    def _evict(self, block: Block) -> None:
        self._cached -= 1
        self._drop(block)

    def _drop(self, block: Block) -> None:
        """Take a block that nobody holds out of the tree and put it into the free list."""
        if block.keys:
            self._children(block.parent).discard(block.id)
            if block.indexed:
                del self._full[(block.parent, tuple(block.keys))]
            if block.parent != ROOT:
                self._offer(self._blocks[block.parent])
        block.parent, block.keys, block.indexed = ROOT, [], False
        if self._kept:
            self._kept.discard(block.id)
        self._free.add(block.id)
        heapq.heappush(self._free_heap, block.id)

    # -- invariants

    def check(self) -> None:
        """Raise AssertionError unless every invariant of this module's docstring holds."""
        refs = [0] * self.num_blocks
        for table in self._tables:
            assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
            assert self.blocks_for(table.length) <= len(table.blocks), (
                "a table claims rows it has no block for"
            )
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
            if free or not block.keys:
                linked = block.keys or block.children or block.indexed
                assert not linked, f"free block {block.id} is linked"
                assert free or block.refs, f"block {block.id} is lost"
                continue
            cached += block.refs == 0
            assert block.id in self._children(block.parent), f"block {block.id} is not a child of its parent"
            assert len(block.keys) <= self.block_size
            assert block.indexed == (len(block.keys) == self.block_size), (
                f"block {block.id} is not indexed rightly"
            )
            assert block.indexed or not block.children, f"unfinished block {block.id} has children"
            if block.indexed:
                assert self._full.get((block.parent, tuple(block.keys))) == block.id
            for child in block.children:
                assert block.refs or not self._blocks[child].refs, f"block {child} is held but not its parent"
        assert not (self._kept or set()) & self._free, (
            "a free block is taken for one of the conversation in use"
        )
        assert cached == self._cached, f"{self._cached} blocks are counted as cached, there are {cached}"
        assert len(self._full) == sum(block.indexed for block in self._blocks), "the index has stale entries"


def _common_prefix(first: Sequence[Key], second: Sequence[Key]) -> int:
    rows = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        rows += 1
    return rows
