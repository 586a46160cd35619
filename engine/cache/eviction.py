"""Which cached block goes where somebody needs room. Pure Python, no tensors.

One after the other is evicted by this rule:

1. of the leaves off the paths that are named below, the one that was used longest ago;
2. when there are none, for people only, the ends of the paths that `keep` named, those used longest ago first;
3. last, for people only, the end of the path that `pin` named, the conversation in use.

So other branches go before what the branches share, the conversation shrinks from its end, and the system prompt,
where every path begins, goes last.

Where every layer has a window (`engine/cache/window.py`) any cached block may be evicted. What a sequence let go of
while it ran goes before what it held at its end, in the order of the rows, and of paths with names only that
counts which what follows them sees.
"""

from collections.abc import Iterable, Mapping, Sequence

from engine.cache.min_set import MinSet
from engine.cache.prefix_index import Block, Key, PrefixIndex

Rank = tuple[int, int, int, int]
"""Whether it is kept (1) or in use (2), when it was used, how far from the end of its path, its id: the smallest goes
first."""


class Eviction:
    """The blocks that can be evicted. It belongs to the block manager."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._evictable: MinSet[Rank] = MinSet()
        self._in_use: Sequence[Key] = ()
        self._kept: dict[str, Sequence[Key]] = {}
        self._spared: dict[Block, int] = {}
        """What goes late, and how late."""
        self._changed = False

    def pin(self, keys: Sequence[Key]) -> None:
        """The path of `keys` goes last. It takes the place of the one that was named before."""
        self._in_use = list(keys)
        self._changed = True

    def keep(self, name: str, keys: Sequence[Key] | None) -> None:
        """The path of `keys` goes late, until its name is given to another one; None: to nothing."""
        self._kept.pop(name, None)
        if keys is not None:
            self._kept[name] = list(keys)
        self._changed = True

    def note_change(self) -> None:
        """Other blocks may be on the paths that have names."""
        self._changed = True

    def spared(self) -> Mapping[Block, int]:
        """The blocks that idle work leaves alone, looked up when somebody needs room and they may have changed."""
        if self._changed:
            before, self._spared = self._spared, {}
            for keys in self._kept.values():
                self._spared.update(dict.fromkeys(self._path(keys), 1))
            self._spared.update(dict.fromkeys(self._path(self._in_use), 2))
            self._changed = False
            for block in {block for block, _ in before.items() ^ self._spared.items()}:
                self.offer(block)
        return self._spared

    def _path(self, keys: Sequence[Key]) -> list[Block]:
        path, partial, _ = self._index.find(keys)
        found = path[self._index.first(len(path)) :]
        return found if partial is None else [*found, partial]

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
        self._spared.pop(block, None)

    def next(self) -> int:
        """The id of the block whose turn it is. There must be one, or for idle work one that is not spared."""
        self.spared()
        *_, id = self._evictable.smallest()
        return id

    def check(self, blocks: Iterable[Block]) -> None:
        """Raise AssertionError unless of `blocks`, all there are, those that may be evicted can be, in their turn."""
        ranks = {self._rank(block) for block in blocks if self._may_go(block)}
        assert set(self._evictable) == ranks, (
            "a block cannot be evicted, or one can that must not, or too soon"
        )
        assert not any(block.is_gone for block in self._spared), "a block that has gone is spared"

    def _may_go(self, block: Block) -> bool:
        has_rows = bool(block.keys) and not block.is_gone
        return has_rows and not block.refs and (self._index.has_window or not block.children)

    def _rank(self, block: Block) -> Rank:
        return self._spared.get(block, 0), block.last_used, -block.depth, block.id
