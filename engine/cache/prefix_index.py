"""The tree of blocks in which the longest cached prefix of some rows is found. Pure Python, no tensors.

A node is a block; its children continue its rows. A full block is found by `(parent block, keys of its rows)`. The
parent stands for everything before it, so this is a hash chained from the start with hits compared key by key (a dict
does both). The last, partly filled block of a path is a leaf and is found by comparing rows.

    root -- [a b c d] -- [e f g h] -- [i j]          a path and its unfinished tail
                     \\-- [e f x y]                   a branch: "e f" was copied on write

If every layer has a window, a path is present as soon as the blocks are present that the rows after it see. Earlier
blocks may be *gone*: evicted but still in the tree, because their rows determine the blocks after them. In the same
way, each of `engine/cache/groups.py` needs only the blocks that the rows after the path see there.
"""

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import TypeVar

from engine.cache.block import GONE, Block, Key
from engine.cache.groups import Groups
from engine.cache.offload import ROOT_NAME, common_prefix
from engine.cache.window import Window

T = TypeVar("T")


class PrefixIndex:
    """The place of every block in the tree. It belongs to the block manager."""

    def __init__(
        self,
        blocks: Sequence[Block],
        block_size: int,
        window: Window | None,
        groups: Groups,
    ) -> None:
        """`blocks` is the block manager's list of the blocks that are not gone, by id; its entries change."""
        self.blocks = blocks
        self.block_size = block_size
        self._window = window
        self._groups = groups
        self.root = Block(GONE)
        self._full: dict[tuple[Block, tuple[Key, ...]], Block] = {}

    @property
    def has_window(self) -> bool:
        """Whether a block may be evicted while others follow it."""
        return self._window is not None

    def first(self, blocks: int, since: int = maxsize) -> int:
        """Return the first block needed to continue after `blocks` full ones, and to keep the rows from `since` on."""
        return (
            min(self._window.first(blocks, self.block_size), since // self.block_size) if self._window else 0
        )

    def chain(self, keys: Sequence[Key]) -> list[Block]:
        """Return the full blocks of the longest known path of `keys`; some may be gone."""
        path: list[Block] = []
        parent = self.root
        for end in range(self.block_size, len(keys) + 1, self.block_size):
            child = self._full.get((parent, tuple(keys[end - self.block_size : end])))
            if child is None:
                break
            path.append(child)
            parent = child
        return path

    def path_to(self, block: Block) -> list[Block]:
        """Return the blocks of the path that ends with `block`, in order."""
        path: list[Block] = []
        while block.parent is not None:
            path.append(block)
            block = block.parent
        return path[::-1]

    def branches(self, keys: Sequence[Key]) -> int:
        """Return how many paths continue `keys` (its whole blocks), counted by their leaves."""
        path = self.chain(keys)
        if len(path) < len(keys) // self.block_size:
            return 0
        count, below = 0, list((path[-1] if path else self.root).children)
        while below:
            block = below.pop()
            below += block.children
            rest = keys[(block.depth - 1) * self.block_size :]
            count += not block.children and block.keys != list(rest)
        return count

    def find(
        self, keys: Sequence[Key], since: int = maxsize, group_since: int = maxsize
    ) -> tuple[list[Block], Block | None, int]:
        """Return the full blocks of the longest prefix present, a block with more of its rows, and how many more.

        All blocks from index `first(len(path), since)` on are present, and in each group those that it needs.
        """
        path = self.chain(keys)
        if self._window is not None or self._groups.pools:
            del path[self.present(path, since, group_since, self._has) :]
        block, rows = self.go_on(path, keys, self._has_all)
        while (marks := self._groups.marks) is not None:
            whole = len(path) * self.block_size
            end, _ = marks.resume([self.root, *path], whole + rows, keys, rows > 0)
            rows = end - whole
            if rows >= 0:
                return path, block if rows else None, rows
            del path[end // self.block_size :]
            del path[self.present(path, since, group_since, self._has) :]
            block, rows = self.go_on(path, keys, self._has_all)
        return path, block, rows

    def present(self, path: Sequence[T], since: int, group_since: int, has: Callable[[T, int], bool]) -> int:
        """Return how many leading blocks of `path` a table can hold: all that it needs then are present.

        `has(block, group)` says whether the rows of a block in a group are.
        """
        end, before = len(path), -1
        while end != before:
            before = end
            firsts = self._groups.firsts(before, group_since)
            if self._window is not None:
                firsts.append(self.first(before, since))
            for group, first in enumerate(firsts, 1):
                group %= len(self._groups.pools) + 1  # the primary group comes last
                end = next((i for i in range(end - 1, first - 1, -1) if not has(path[i], group)), end)
        return end

    def _has(self, block: Block, group: int) -> bool:
        return block.id in self._groups.pools[group - 1] if group else not block.is_gone

    def _has_all(self, block: Block) -> bool:
        return self._groups.have(block.id)

    def go_on(
        self, path: Sequence[Block], keys: Sequence[Key], fits: Callable[[Block], bool] = lambda block: True
    ) -> tuple[Block | None, int]:
        """Return a block after `path` that `fits` and has the next rows of `keys`, and how many; else (None, 0)."""
        best, best_rank = None, (0, False)
        rest = keys[len(path) * self.block_size : (len(path) + 1) * self.block_size]
        first = rest[:1]
        for block in path[-1].children if path else self.root.children:
            # Many blocks may follow the root, and nearly all of them begin with another key.
            if block.keys[:1] != first or block.is_gone or not fits(block):
                continue
            rows = common_prefix(block.keys, rest)
            # Among equals, prefer a block that can be used in place to one that must be copied, then the first.
            rank = (rows, block.refs == 0 and rows == len(block.keys))
            if rows and rank > best_rank:
                best, best_rank = block, rank
        return best, best_rank[0]

    def link(self, block: Block, parent: Block) -> None:
        """Attach `block`, which gets its first row, to `parent`."""
        block.parent, block.depth = parent, parent.depth + 1
        parent.children[block] = None

    def complete(self, block: Block) -> Block:
        """Index the full `block`. Return the block that is found by its rows: itself, or an equal one known before."""
        assert block.parent is not None
        found = self._full.setdefault((block.parent, tuple(block.keys)), block)
        block.indexed = found is block
        return found

    def begins_another(self, block: Block, rows: int) -> bool:
        """Return whether another child of the same parent begins with the first `rows` rows of `block`."""
        assert block.parent is not None
        begins = block.keys[:rows]
        return any(other is not block and other.keys[:rows] == begins for other in block.parent.children)

    def shorten(self, block: Block, rows: int) -> None:
        """Forget all but the first `rows` rows of a leaf; `prune` alone passes 0."""
        if block.indexed:
            assert block.parent is not None
            del self._full[(block.parent, tuple(block.keys))]
        block.indexed, block.name = False, ROOT_NAME
        del block.keys[rows:], block.origins[rows:]

    def prune(self, block: Block) -> Block:
        """Remove a block that is gone from the tree, and its ancestors that are gone, up to one with other children.

        Return the first block that stays.
        """
        while block.parent is not None and block.is_gone and not block.children:
            self.shorten(block, 0)
            parent, block.parent = block.parent, None
            parent.children.pop(block, None)
            block = parent
        return block

    def check(self) -> None:
        """Raise AssertionError unless the place of every block in the tree agrees with its rows."""
        for block in self.blocks:
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
                assert 0 < len(block.origins) == len(block.keys) <= self.block_size
                assert block.indexed == (len(block.keys) == self.block_size), (
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
                    assert self.blocks[block.id] is block, f"block {block.id} is not where it says"
                    here += 1
        assert here == sum(bool(block.keys) for block in self.blocks), "a child has gone"
        assert len(self._full) == found, "the index has stale entries"
