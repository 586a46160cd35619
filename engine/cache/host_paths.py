"""Paths of which some rows or states lie in host memory. Pure Python, no tensors.

A block is copied to the host tier when it is evicted. The slots that it has in groups with a window are lost long
before that, so what the end of a table held there is copied when it loses its slot. A path can then be resumed where
all its blocks are on the device or in host memory, and in each group the last ones.

A mark of recurrent layers that is not minor is copied, with the rows of the log before it, when it is given up for its
slot, when its block is evicted, and when those rows are lost. From such a copy a path is resumed at its very row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as bind
from sys import maxsize

from engine.cache.block import Block, Key
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.copies import STATES, Copy, Logged, Offload, OffloadStates, Restore, RestoreStates
from engine.cache.groups import Groups
from engine.cache.live_state import Mark
from engine.cache.offload import ROOT_NAME, HostTier, Offloaded
from engine.cache.prefix_index import PrefixIndex
from engine.cache.table_states import TableStates


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
    states: Offloaded | None = None
    """The copy with the states of recurrent layers after all these rows; None: the device has states to go on from."""
    gained: int = 0
    """How many rows more they are than could be resumed without host memory."""


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
        for group, pool in enumerate(groups.pools, 1):
            pool.lose = bind(self._offload_slot, group)
        if groups.marks is not None:
            groups.marks.lose = self._offload_states

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
        if not in_host or not len(self.tier) or self.length(found) == len(keys):
            return found
        known = self._index.chain(keys) if self._groups else path
        if self._groups and self._index.has_window:  # some are gone; what follows a path continues at its end
            del known[self._index.present(known, since, group_since, self._has) :]
        more = [block for block, count in self.follow(known, keys) if count == self._index.block_size]
        line: list[Block | Offloaded] = [*known, *more]
        here = self.length(found)
        if self._groups.marks is not None:  # with states comes the end of the log alone
            states = self._find_states(found, known, more, keys) if group_since == maxsize else None
            return states or found
        end = self._index.present(line, since, group_since, self._has)
        longer = self._up_to(end, known, more, keys)
        if self.length(longer) <= here:
            return found
        if not self._groups:  # as far as there is no room for what comes back, the path goes on here
            longer = replace(longer, partial=partial, rows=rows)
        return replace(longer, gained=self.length(longer) - here)

    def _find_states(
        self, here: FoundPath, known: Sequence[Block], more: Sequence[Offloaded], keys: Sequence[Key]
    ) -> FoundPath | None:
        """Return the longest path of `keys` that has states in host memory and is longer than `here`.

        `known` are its full blocks on the device, and `more` those after them in host memory.
        """
        size, least = self._index.block_size, self.length(here)
        line: list[Block | Offloaded] = [*known, *more]
        for count in range(len(line), least // size - 1, -1):
            name = line[count - 1].name if count else ROOT_NAME
            for states in self.tier.states(name, keys[count * size :][:size]):
                row = count * size + len(states.keys)
                end = row // size
                if row <= least or self._index.present(line[:end], maxsize, maxsize, self._has) < end:
                    continue
                found = self._up_to(end, known, more, keys[:row])
                if self.length(found) == row:
                    return replace(found, states=states, gained=row - least)
        return None

    def _up_to(
        self, end: int, known: Sequence[Block], more: Sequence[Offloaded], keys: Sequence[Key]
    ) -> FoundPath:
        """Return the path of the first `end` full blocks of `keys`, and what goes on after them."""
        size, groups = self._index.block_size, self._groups.but_log
        path, offloaded = known[:end], [(block, size) for block in more[: max(end - len(known), 0)]]
        partial, rows = None, 0
        if end <= len(known):
            partial, rows = self._index.go_on(
                path, keys, lambda block: all(self._has(block, group) for group in groups)
            )
        last = offloaded[-1][0] if offloaded else path[-1] if path else None
        name = last.name if last is not None else ROOT_NAME
        tail, count = self.tier.begin(name, keys[end * size :][:size], groups)
        if tail is not None and count > rows:
            offloaded.append((tail, count))
        return FoundPath(end, list(path), partial, rows, offloaded)

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
        """Copy a block that is evicted, and what goes with it. Raises what `carry_out` raises."""
        for group in self._groups.but_log:
            if group == 0 or self._groups.pools[group - 1].is_end(block.id):
                self._offload(block, group)
        if self._groups.marks is not None:
            for mark in self._groups.marks.leaving(block):
                self._offload_states(mark)

    def _offload_slot(self, group: int, id: int) -> None:
        """Copy the rows of a block that loses its slot in a group, if a path ended there, or the marks that need it."""
        pool, block, marks = self._groups.pools[group - 1], self._index.blocks[id], self._groups.marks
        if marks is None or pool is not marks.log:
            if pool.is_end(id):
                self._offload(block, group)
        elif pool.is_spared(id):
            for mark in marks.needing(block):
                self._offload_states(mark)

    def _offload_states(self, mark: Mark) -> None:
        marks = self._groups.marks
        assert marks is not None
        blocks = marks.log_blocks(mark)
        if blocks is None or mark.is_minor:
            return
        states = Logged(mark.slot, tuple(block.id for block in blocks), mark.row)
        name, parent, keys = ROOT_NAME, mark.parent.name, mark.keys
        if not keys:
            name, parent, keys = self.identity(mark.parent)

        def write(slots: tuple[int, ...]) -> None:
            self._carry_out(OffloadStates(states, slots))

        self.tier.put(name, parent, keys, write, STATES, mark.row)

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
        pool.take(block.id)
        if group not in copy.slots:  # they went to what made room
            pool.release(block.id, 0)
            pool.drop(block.id)
            return False
        try:
            self._carry_out(Restore(copy.slots[group], block.id, group))
        except BaseException:
            pool.release(block.id, 0)
            pool.drop(block.id)
            self.tier.drop(copy)
            raise
        self.tier.restored_rows += len(block.keys)
        return True

    def bring_states(
        self, table: BlockTable, found: FoundPath, states: TableStates, keys: Sequence[Key], idle: bool
    ) -> bool:
        """Give `table`, which has the rows of `found` and no states, those from host memory.

        Return False if there is no room, or they are no longer there. `idle` is as in `BlockManager.reserve`. Raises
        what `carry_out` raises.
        """
        copy, row = found.states, self.length(found)
        if copy is None or table.length != row or STATES not in copy.slots:
            return False
        self.tier.touch([copy])

        def fill(slot: int, blocks: Sequence[int]) -> None:
            if STATES not in copy.slots:  # they went to what made room
                raise OutOfBlocksError
            self._carry_out(RestoreStates(copy.slots[STATES], Logged(slot, tuple(blocks), row)))

        try:
            states.adopt(table, idle, fill, states.fork(keys))
        except OutOfBlocksError:
            return False
        except BaseException:
            self.tier.drop(copy)
            raise
        self.tier.restored_rows += max(found.gained - sum(count for _, count in found.offloaded), 0)
        return True
