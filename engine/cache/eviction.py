"""Which cached block goes where somebody needs room. Pure Python, no tensors.

One after the other is evicted by this rule:

1. of the leaves off the path that `pin` named, the conversation in use, the one that was used longest ago;
2. when there are none, the end of that path, but never for idle work.

So other branches go before what the branches share, the conversation shrinks from its end, and the system prompt,
where every path begins, goes last.

Where every layer has a window (`engine/cache/window.py`) any cached block may be evicted. What a sequence let go of
while it ran goes before what it held at its end, in the order of the rows, and the conversation in use is only what its
next turn sees.
"""

from collections.abc import Iterable, Sequence

from engine.cache.min_set import MinSet
from engine.cache.prefix_index import Block, Key, PrefixIndex

Rank = tuple[bool, int, int, int]
"""Whether it is pinned, when it was used, how far from the end of its path, its id: the smallest goes first."""


class Eviction:
    """The blocks that can be evicted. It belongs to the block manager."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._evictable: MinSet[Rank] = MinSet()
        self._in_use: Sequence[Key] = ()
        self._pinned: set[Block] = set()
        self._changed = False

    def pin(self, keys: Sequence[Key]) -> None:
        """The path of `keys` goes last. It takes the place of the one that was named before."""
        self._in_use = list(keys)
        self._changed = True

    def note_change(self) -> None:
        """Other blocks may be on the path that is pinned."""
        self._changed = True

    def pinned(self) -> set[Block]:
        """The blocks of the conversation in use, looked up when somebody needs room and they may have changed."""
        if self._changed:
            path, partial, _ = self._index.find(self._in_use)
            before, self._pinned = self._pinned, set(path[self._index.first(len(path)) :])
            if partial is not None:
                self._pinned.add(partial)
            self._changed = False
            for block in before ^ self._pinned:
                self.offer(block)
        return self._pinned

    def offer(self, block: Block) -> None:
        """Have a block evicted when its turn comes, if it may be: without a window, if none follow it."""
        self.withdraw(block)
        if self._may_go(block):
            block.rank = self._rank(block)
            self._evictable.add(block.rank)

    def withdraw(self, block: Block) -> None:
        """Somebody holds it now."""
        self._evictable.discard(block.rank)

    def forget(self, block: Block) -> None:
        """Its rows are no more."""
        self.withdraw(block)
        self._pinned.discard(block)

    def next(self) -> int:
        """The id of the block whose turn it is. There must be one, or for idle work one that is not pinned."""
        self.pinned()
        *_, id = self._evictable.smallest()
        return id

    def check(self, blocks: Iterable[Block]) -> None:
        """Raise AssertionError unless of `blocks`, all there are, those that may be evicted can be, in their turn."""
        ranks = {self._rank(block) for block in blocks if self._may_go(block)}
        assert set(self._evictable) == ranks, (
            "a block cannot be evicted, or one can that must not, or too soon"
        )
        assert not any(block.is_gone for block in self._pinned), "a block that has gone is pinned"

    def _may_go(self, block: Block) -> bool:
        has_rows = bool(block.keys) and not block.is_gone
        return has_rows and not block.refs and (self._index.has_window or not block.children)

    def _rank(self, block: Block) -> Rank:
        return block in self._pinned, block.last_used, -block.depth, block.id
