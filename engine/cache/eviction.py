"""Chooses the cached block to evict when room is needed. Pure Python, no tensors.

Blocks are evicted in this order:

1. of the leaves outside all named paths, the least recently used;
2. if there are none, and only for a person's request, the ends of the paths that `keep` named, least recently used
   first;
3. last, and only for a person's request, the end of the path that `pin` named, the conversation in use.

So other branches go before the rows that branches share, the conversation shrinks from its end, and the system
prompt, where every path begins, goes last.

If every layer has a window (`engine/cache/window.py`), any cached block may be evicted. Blocks that a sequence
released while it ran go before those that it held at its end, in the order of the rows. Of a named path, only the
blocks that its next row sees are spared. The same is true of the slots of each of `engine/cache/groups.py`.
"""

from collections.abc import Iterable, Mapping, Sequence

from engine.cache.block import Block, Key
from engine.cache.groups import Groups
from engine.cache.min_set import MinSet
from engine.cache.prefix_index import PrefixIndex

Rank = tuple[int, int, int, int]
"""0, or 1 for a kept path and 2 for the one in use; the time of last use; minus the depth; the id. The smallest is
evicted first."""


NEEDED, WANTED = 0.5, 0.75
"""The degrees of a slot that a mark needs, on whatever path and on a named one, where idle work may take it."""


class Eviction:
    """The blocks that can be evicted. It belongs to the block manager."""

    def __init__(self, index: PrefixIndex, groups: Groups) -> None:
        self._index = index
        self._groups = groups
        self._evictable: MinSet[Rank] = MinSet()
        self._in_use: Sequence[Key] = ()
        self._kept: dict[str, Sequence[Key]] = {}
        self._spared: dict[Block, int] = {}
        """The blocks on named paths: 1 for a kept path, 2 for the conversation in use."""
        self._changed = False

    def pin(self, keys: Sequence[Key]) -> None:
        """Mark the path of `keys` as evicted last. It replaces the one marked before."""
        self._in_use = list(keys)
        self._changed = True

    def keep(self, name: str, keys: Sequence[Key] | None) -> None:
        """Keep the path of `keys` under a name, replacing the path with that name; None only removes that one."""
        self._kept.pop(name, None)
        if keys is not None:
            self._kept[name] = list(keys)
        self._changed = True

    def note_change(self) -> None:
        """Note that the blocks on the named paths may have changed."""
        self._changed = True

    def spared(self) -> Mapping[Block, int]:
        """Return the blocks that idle work must not evict, looked up again if the named paths may have changed."""
        if self._changed:
            before, self._spared = self._spared, {}
            slots: list[dict[int, float]] = [{} for _ in self._groups.pools]
            self._spare_marks(slots)
            for keys, degree in self._named:
                path, partial, _ = self._index.find(keys)
                end = [] if partial is None else [partial]
                self._spared.update(dict.fromkeys([*path[self._index.first(len(path)) :], *end], degree))
                for found, first in zip(slots, self._groups.firsts(len(path)), strict=True):
                    found.update((block.id, degree) for block in [*path[first:], *end])
            self._changed = False
            for block in {block for block, _ in before.items() ^ self._spared.items()}:
                self.offer(block)
            for pool, found in zip(self._groups.pools, slots, strict=True):
                pool.spare(found)
        return self._spared

    @property
    def _named(self) -> list[tuple[Sequence[Key], int]]:
        """The named paths, each with its degree, the conversation in use last."""
        return [*((kept, 1) for kept in self._kept.values()), (self._in_use, 2)]

    def _spare_marks(self, slots: Sequence[dict[int, float]]) -> None:
        """Say which marks go last, and add to `slots` of the log of recurrent layers the blocks that marks need."""
        marks = self._groups.marks
        if marks is None:
            return
        log = marks.log
        found = slots[self._groups.pools.index(log)]
        found.update((block.id, NEEDED) for mark in marks for block in marks.needed(mark))
        named = []
        room = log.num_slots - log.window.most_blocks(self._index.block_size)  # the rest is left to idle work
        for keys, degree in reversed(self._named):
            path = self._index.chain(keys)
            own = list(marks.along([self._index.root, *path], keys))
            named.append((degree, own[::-1], len(keys)))
            ends = [block for mark in own for block in marks.needed(mark)]
            around = [block for mark in own for block in marks.needed(mark, path)]
            for block in [block for block in (*ends, *around) if block.id in log]:
                if found.get(block.id, 0.0) < WANTED:
                    found[block.id] = degree if room > 0 else WANTED
                    room -= 1
        marks.spare(named[::-1])

    def offer(self, block: Block) -> None:
        """Make a block a candidate for eviction if it may be evicted: without a window, only if none follow it."""
        self.withdraw(block)
        if self._may_go(block):
            block.rank = self._rank(block)
            self._evictable.add(block.rank)

    def withdraw(self, block: Block) -> None:
        """Take a block out of the candidates, because a table holds it now."""
        self._evictable.discard(block.rank)

    def forget(self, block: Block) -> None:
        """Forget a block whose rows are dropped."""
        self.withdraw(block)
        self._spared.pop(block, None)
        for pool in self._groups.pools:
            pool.forget(block.id)

    def next(self) -> int:
        """Return the id of the block to evict next. There must be one; for idle work, one that is not spared."""
        self.spared()
        *_, id = self._evictable.smallest()
        return id

    def check(self, blocks: Iterable[Block]) -> None:
        """Raise AssertionError unless exactly those of `blocks` (all blocks) are candidates that may be, in order."""
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
