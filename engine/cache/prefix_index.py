"""The tree of blocks by which the longest cached prefix of some rows is found. Pure Python, no tensors.

A node is a block; its children continue its rows. A full block is found by `(parent block, keys of its rows)`: the
parent stands for everything before it, so the lookup is a hash chained from the start whose hits are compared key by
key (a dict does both). The last, partly filled block of a path is a leaf and is found by comparing rows.

    root -- [a b c d] -- [e f g h] -- [i j]          a path and its unfinished tail
                     \\-- [e f x y]                   a branch: "e f" was copied on write

Where every layer has a window, a path is present as soon as the blocks are that the rows after it see. Those before
may be *gone*: evicted, and yet in the tree, for what their rows were is part of what the blocks after them are.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from sys import maxsize

from engine.cache.offload import ROOT_NAME, common_prefix
from engine.cache.window import Window

Key = Hashable
"""What identifies the KV of one row, given the rows before it: a token id, or more where the row was computed
with something in view that is no longer in the table (see `engine/cache/rows.py`)."""

GONE = -1
"""In place of the id of a block whose rows lie nowhere."""


@dataclass(slots=True, eq=False)
class Block:
    """One block. `keys[i]` is the key of row i; a row without a key has not been written."""

    id: int
    """Where its rows lie, or GONE."""
    refs: int = 0
    parent: "Block | None" = field(default=None, repr=False)
    """None for the root, where paths begin, and for a block without rows."""
    keys: list[Key] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """For each of `keys` who had it computed (see `Sequence.origin`); 0: nobody asks."""
    children: "set[Block]" = field(default_factory=set, repr=False)
    indexed: bool = False
    depth: int = 0
    """Its number on its path, from 1; 0 for the root."""
    last_used: int = 0
    rank: tuple[int, int, int, int] = (0, 0, 0, GONE)
    """Its place among the blocks that can be evicted."""
    name: int = ROOT_NAME
    """What `engine/cache/offload.py` knows a full block by."""

    @property
    def is_gone(self) -> bool:
        """Whether its rows were evicted; the root has none."""
        return self.id == GONE


class PrefixIndex:
    """Where each of `blocks` stands in the tree. It belongs to the block manager."""

    def __init__(self, blocks: Sequence[Block], block_size: int, window: Window | None = None) -> None:
        """`blocks` are those that are not gone, which change."""
        self._blocks = blocks
        self._size = block_size
        self._window = window
        self.root = Block(GONE)
        self._full: dict[tuple[Block, tuple[Key, ...]], Block] = {}

    @property
    def has_window(self) -> bool:
        """Whether a block may be gone that others follow."""
        return self._window is not None

    def first(self, blocks: int, since: int = maxsize) -> int:
        """The first block that whoever goes on behind `blocks` full ones needs, if also the rows from `since` on."""
        return min(self._window.first(blocks, self._size), since // self._size) if self._window else 0

    def chain(self, keys: Sequence[Key]) -> list[Block]:
        """The full blocks of the longest path that is known of `keys`; some may be gone."""
        path: list[Block] = []
        parent = self.root
        for end in range(self._size, len(keys) + 1, self._size):
            child = self._full.get((parent, tuple(keys[end - self._size : end])))
            if child is None:
                break
            path.append(child)
            parent = child
        return path

    def find(self, keys: Sequence[Key], since: int = maxsize) -> tuple[list[Block], Block | None, int]:
        """The full blocks of the longest prefix that is present, and a block that has `rows` more of its rows.

        From block `first(len(path), since)` on all are.
        """
        path = self.chain(keys)
        if self._window is not None:
            here = present = 0
            for index, block in enumerate(path):
                if block.is_gone:
                    here = index + 1
                elif self.first(index + 1, since) >= here:
                    present = index + 1
            del path[present:]
        return path, *self.go_on(path, keys)

    def go_on(self, path: Sequence[Block], keys: Sequence[Key]) -> tuple[Block | None, int]:
        """A block after those of `path` that has more rows of `keys`, if there is one, and how many."""
        best, best_rank = None, (0, False)
        rest = keys[len(path) * self._size : (len(path) + 1) * self._size]
        first = rest[:1]
        for block in path[-1].children if path else self.root.children:
            # Many may follow the root, and nearly all of them begin otherwise.
            if block.keys[:1] != first or block.is_gone:
                continue
            rows = common_prefix(block.keys, rest)
            # Of equals, take one that can be used in place rather than copied.
            rank = (rows, block.refs == 0 and rows == len(block.keys))
            if rows and rank > best_rank:
                best, best_rank = block, rank
        return best, best_rank[0]

    def link(self, block: Block, parent: Block) -> None:
        """`block` gets its first row, after the rows of `parent`."""
        block.parent, block.depth = parent, parent.depth + 1
        parent.children.add(block)

    def complete(self, block: Block) -> Block:
        """`block` is full. Returns the block that is found by its rows: itself, or an equal one that was there."""
        assert block.parent is not None
        found = self._full.setdefault((block.parent, tuple(block.keys)), block)
        block.indexed = found is block
        return found

    def begins_another(self, block: Block, rows: int) -> bool:
        """Whether another block after the same parent begins with the first `rows` rows of this one."""
        assert block.parent is not None
        siblings = block.parent.children - {block}
        return any(other.keys[:rows] == block.keys[:rows] for other in siblings)

    def shorten(self, block: Block, rows: int) -> None:
        """Forget all but the first `rows` rows of a leaf, one of them at least."""
        if block.indexed:
            assert block.parent is not None
            del self._full[(block.parent, tuple(block.keys))]
        block.indexed, block.name = False, ROOT_NAME
        del block.keys[rows:], block.origins[rows:]

    def prune(self, block: Block) -> Block:
        """Take a block that is gone out of the tree, and those before it that are, unless others follow.

        Returns the first that stays.
        """
        while block.parent is not None and block.is_gone and not block.children:
            self.shorten(block, 0)
            parent, block.parent = block.parent, None
            parent.children.discard(block)
            block = parent
        return block

    def check(self) -> None:
        """Raise AssertionError unless every block with rows is where its rows say, and every other one nowhere."""
        for block in self._blocks:
            if not block.keys:
                linked = block.parent or block.children or block.indexed or block.origins
                assert not linked, f"block {block.id} without rows is linked"
        found, here = 0, 0
        below = [self.root]
        while below:
            parent = below.pop()
            below += parent.children
            for block in parent.children:
                assert block.parent is parent, f"block {block.id} is not a child of its parent"
                assert block.depth == parent.depth + 1
                assert 0 < len(block.origins) == len(block.keys) <= self._size
                assert block.indexed == (len(block.keys) == self._size), (
                    f"block {block.id} is not indexed rightly"
                )
                assert block.indexed or not block.children, f"unfinished block {block.id} has children"
                if block.indexed:
                    assert self._full.get((parent, tuple(block.keys))) is block
                    found += 1
                if block.is_gone:
                    assert self._window is not None, "a block is gone and others follow"
                    assert block.children, "a block is gone, and nothing follows"
                    assert block.refs == 0, "a block is gone and held"
                else:
                    assert self._blocks[block.id] is block, f"block {block.id} is not where it says"
                    here += 1
        assert here == sum(bool(block.keys) for block in self._blocks), "a child has gone"
        assert len(self._full) == found, "the index has stale entries"
