"""The tree of blocks by which the longest cached prefix of some rows is found. Pure Python, no tensors.

A node is a block; its children continue its rows. A full block is found by `(parent block, keys of its rows)`: the
parent stands for everything before it, so the lookup is a hash chained from the start whose hits are compared key by
key (a dict does both). The last, partly filled block of a path is a leaf and is found by comparing rows.

    root -- [a b c d] -- [e f g h] -- [i j]          a path and its unfinished tail
                     \\-- [e f x y]                   a branch: "e f" was copied on write
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from engine.cache.offload import ROOT_NAME, common_prefix

Key = Hashable
"""What identifies the KV of one row, given the rows before it: a token id, or more where the row was computed
with something in view that is no longer in the table (see `engine/cache/rows.py`)."""

ROOT = -1


@dataclass(slots=True)
class Block:
    """One block. `keys[i]` is the key of row i; a row without a key has not been written."""

    id: int
    refs: int = 0
    parent: int = ROOT
    keys: list[Key] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """For each of `keys` who had it computed (see `Sequence.origin`); 0: nobody asks."""
    children: set[int] = field(default_factory=set)
    indexed: bool = False
    last_used: int = 0
    name: int = ROOT_NAME
    """What `engine/cache/offload.py` knows a full block by."""


class PrefixIndex:
    """Where each of `blocks` stands in the tree. It belongs to the block manager."""

    def __init__(self, blocks: Sequence[Block], block_size: int) -> None:
        self._blocks = blocks
        self._size = block_size
        self._roots: set[int] = set()
        self._full: dict[tuple[int, tuple[Key, ...]], int] = {}

    def children(self, parent: int) -> set[int]:
        """The blocks that follow a block, or begin a path for ROOT. Not to be changed."""
        return self._roots if parent == ROOT else self._blocks[parent].children

    def find(self, keys: Sequence[Key]) -> tuple[list[int], int | None, int]:
        """The full blocks of the longest cached prefix, and a block that has `rows` more of its rows."""
        path: list[int] = []
        parent, position = ROOT, 0
        while position + self._size <= len(keys):
            child = self._full.get((parent, tuple(keys[position : position + self._size])))
            if child is None:
                break
            path.append(child)
            parent = child
            position += self._size
        best, best_rank = None, (0, False)
        rest = keys[position : position + self._size]
        for child in self.children(parent):
            block = self._blocks[child]
            rows = common_prefix(block.keys, rest)
            # Of equals, take one that can be used in place rather than copied.
            rank = (rows, block.refs == 0 and rows == len(block.keys))
            if rows and rank > best_rank:
                best, best_rank = child, rank
        return path, best, best_rank[0]

    def link(self, block: Block, parent: int) -> None:
        """`block` gets its first row, after the rows of `parent`."""
        block.parent = parent
        self.children(parent).add(block.id)

    def complete(self, block: Block) -> int:
        """`block` is full. Returns the block that is found by its rows: itself, or an equal one that was there."""
        found = self._full.setdefault((block.parent, tuple(block.keys)), block.id)
        block.indexed = found == block.id
        return found

    def begins_another(self, block: Block, rows: int) -> bool:
        """Whether another block after the same parent begins with the first `rows` rows of this one."""
        siblings = self.children(block.parent) - {block.id}
        return any(self._blocks[id].keys[:rows] == block.keys[:rows] for id in siblings)

    def shorten(self, block: Block, rows: int) -> None:
        """Forget all but the first `rows` rows of a leaf, one of them at least."""
        if block.indexed:
            del self._full[(block.parent, tuple(block.keys))]
        block.indexed, block.name = False, ROOT_NAME
        del block.keys[rows:], block.origins[rows:]

    def remove(self, block: Block) -> None:
        """Forget all rows of a leaf; it may have none."""
        if block.keys:
            self.children(block.parent).discard(block.id)
        self.shorten(block, 0)
        block.parent = ROOT

    def check(self) -> None:
        """Raise AssertionError unless every block with rows is where its rows say, and every other one nowhere."""
        for block in self._blocks:
            if not block.keys:
                linked = block.children or block.indexed or block.origins
                assert not linked, f"block {block.id} without rows is linked"
                continue
            assert block.id in self.children(block.parent), f"block {block.id} is not a child of its parent"
            assert len(block.origins) == len(block.keys) <= self._size
            assert block.indexed == (len(block.keys) == self._size), (
                f"block {block.id} is not indexed rightly"
            )
            assert block.indexed or not block.children, f"unfinished block {block.id} has children"
            if block.indexed:
                assert self._full.get((block.parent, tuple(block.keys))) == block.id
        linked_to = sum(len(self.children(parent)) for parent in range(ROOT, len(self._blocks)))
        assert linked_to == sum(bool(block.keys) for block in self._blocks), "a child has gone"
        assert len(self._full) == sum(block.indexed for block in self._blocks), "the index has stale entries"
