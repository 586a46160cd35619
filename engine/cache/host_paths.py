"""Paths of which some rows lie in host memory. Pure Python, no tensors.

A block is copied to the host tier when it is evicted. The slots that it has in groups with a window are lost long
before that, so what the end of a table held there is copied when it loses its slot. A path can then be resumed where
all its blocks are on the device or in host memory, and in each group the last ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import maxsize

from engine.cache.block import Block, Key
from engine.cache.copies import Copy, Offload, Restore
from engine.cache.groups import Groups
from engine.cache.offload import ROOT_NAME, HostTier, Offloaded
from engine.cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class FoundPath:
    """The beginning of a path that can be resumed."""

    blocks: int
    """How many full blocks it has."""
    path: list[Block]
    """Those on the device; some may lack slots, whose rows are in host memory."""
    partial: Block | None
    """A block on the device that has more of its rows."""
    rows: int
    """How many."""
    offloaded: list[tuple[Offloaded, int]] = field(default_factory=list)
    """What follows `path` in host memory, and how many rows of each block match: all but of the last."""


class HostPaths:
    """Finds paths on the device and in host memory, and copies blocks. It belongs to the block manager."""

    def __init__(
        self, tier: HostTier, index: PrefixIndex, groups: Groups, carry_out: Callable[[Copy], None]
    ) -> None:
        """`carry_out` is as in the block manager."""
        self.tier = tier
        self._index = index
        self._groups = groups
        self._carry_out = carry_out

    def identity(self, block: Block) -> tuple[int, int, tuple[Key, ...]]:
        """Return what a block with rows is found by: its name, that of its parent, and its keys."""
        assert block.parent is not None
        return block.name, block.parent.name, tuple(block.keys)

    # -- look-ups

    def find(
        self, keys: Sequence[Key], since: int = maxsize, group_since: int = maxsize, in_host: bool = True
    ) -> FoundPath:
        """Return the longest prefix of `keys` that can be resumed, with host memory only if `in_host`.

        `since` and `group_since` are as in `BlockManager.open`.
        """
        path, partial, rows = self._index.find(keys, since, group_since)
        found = FoundPath(len(path), path, partial, rows)
        if not in_host or not len(self.tier):
            return found
        size, groups = self._index.block_size, range(1 + len(self._groups.pools))
        known = self._index.chain(keys)
        if self._index.has_window:  # some are gone; what follows a path continues at its end
            del known[self._index.present(known, since, group_since, self._has) :]
        more = [block for block, count in self.follow(known, keys) if count == size]
        line: list[Block | Offloaded] = [*known, *more]
        end = self._index.present(line, since, group_since, self._has)
        del line[end:]
        partial, rows = None, 0
        if end <= len(known):
            partial, rows = self._index.go_on(
                known[:end], keys, lambda block: all(self._has(block, group) for group in groups)
            )
        last, count = self.tier.begin(line[-1].name if line else ROOT_NAME, keys[end * size :][:size], groups)
        if end * size + max(rows, count) <= self.length(found):
            return found
        offloaded = [(block, size) for block in more[: max(end - len(known), 0)]]
        if last is not None and count > rows:
            offloaded.append((last, count))
        if not self._groups:  # as far as there is no room for these, the path goes on here
            partial, rows = found.partial, found.rows
        return FoundPath(end, known[:end], partial, rows, offloaded)

    def length(self, found: FoundPath) -> int:
        """Return how many rows a path has."""
        size = self._index.block_size
        return len(found.path) * size + max(found.rows, sum(count for _, count in found.offloaded))

    def follow(self, path: Sequence[Block], keys: Sequence[Key]) -> list[tuple[Offloaded, int]]:
        """Return the blocks of `keys` after `path` in host memory, and how many rows of each match."""
        rest = keys[len(path) * self._index.block_size :]
        return self.tier.follow(path[-1].name if path else ROOT_NAME, rest, self._index.block_size)

    def _has(self, block: Block | Offloaded, group: int) -> bool:
        """Return whether the rows of a block in a group are on the device or in host memory."""
        if isinstance(block, Block):
            if group == 0:
                return not block.is_gone
            if block.id in self._groups.pools[group - 1]:
                return True
        copy = block if isinstance(block, Offloaded) else self.tier.find(*self.identity(block)[1:])
        return copy is not None and group in copy.slots

    # -- copies

    def offload(self, block: Block) -> None:
        """Copy a block that is evicted. Raises what `carry_out` raises."""
        self._offload(block, 0)
        for group, pool in enumerate(self._groups.pools, 1):
            if pool.is_end(block.id):
                self._offload(block, group)

    def offload_loser(self, group: int) -> None:
        """Copy the rows that the next block with a slot in a group replaces, if some path ended with them.

        Raises what `carry_out` raises.
        """
        pool = self._groups.pools[group - 1]
        loser = pool.loser
        if loser is not None and pool.is_end(loser):
            self._offload(self._index.blocks[loser], group)

    def _offload(self, block: Block, group: int) -> None:
        self.tier.put(
            *self.identity(block), lambda slots: self._carry_out(Offload(block.id, slots, group)), group
        )

    def fill(self, block: Block, group: int, idle: bool) -> bool:
        """Give a block the slot that it lacks in a group, with its rows from host memory, and hold it there.

        Return False if there is no room, or the rows are no longer there. `idle` is as in `BlockManager.reserve`.
        Raises what `carry_out` raises.
        """
        pool = self._groups.pools[group - 1]
        copy = self.tier.find(*self.identity(block)[1:])
        if copy is None or not pool.room(idle):
            return False
        self.tier.touch([copy])
        self.offload_loser(group)
        if group not in copy.slots:
            return False
        pool.take(block.id)
        try:
            self._carry_out(Restore(copy.slots[group], block.id, group))
        except BaseException:
            pool.release(block.id, 0)
            pool.drop(block.id)
            self.tier.drop(copy)
            raise
        self.tier.restored_rows += len(block.keys)
        return True
