"""Which blocks are free, cached or held: taking, releasing and evicting them. Pure Python, no tensors."""

from collections.abc import Sequence

from engine.cache.block import GONE, Block
from engine.cache.block_checks import count_cached
from engine.cache.block_table import BlockTable
from engine.cache.eviction import Eviction
from engine.cache.groups import Groups
from engine.cache.host_paths import HostPaths
from engine.cache.min_set import MinSet
from engine.cache.prefix_index import PrefixIndex
from engine.cache.table_states import TableStates


class BlockPool:
    """The blocks of the primary group. It belongs to the block manager."""

    def __init__(
        self,
        blocks: list[Block],
        index: PrefixIndex,
        groups: Groups,
        eviction: Eviction,
        states: TableStates,
        host: HostPaths,
    ) -> None:
        """`blocks` is the block manager's list of the blocks that are not gone, by id; all are free."""
        self._blocks = blocks
        self._index = index
        self._groups = groups
        self._eviction = eviction
        self._states = states
        self._host = host
        self._free = MinSet(range(len(blocks)))
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def room(self, idle: bool = False) -> int:
        """Return how many blocks can be had, cached ones included. `idle`: as in `BlockManager.reserve`."""
        spared = sum(block.refs == 0 for block in self._eviction.spared()) if idle else 0
        return len(self._free) + self.num_cached - spared

    def has_room(self, table: BlockTable, blocks: int, idle: bool, is_bare: bool = False) -> bool:
        """Return whether `table` can have so many blocks more. `is_bare`: as in `BlockManager.reserve`."""
        if self._groups:
            self._eviction.spared()  # says which slots go last
        has_slots = is_bare or self._groups.has_room(table, blocks, idle)
        return has_slots and (blocks <= len(self._free) or blocks <= self.room(idle))

    def hold(self, block: Block) -> None:
        """Note that one more table holds `block`."""
        if block.refs == 0:
            self.num_cached -= 1
            self._eviction.withdraw(block)
        block.refs += 1

    def release(self, block: Block) -> None:
        """Note that one table fewer holds `block`; one without rows is free then."""
        block.refs -= 1
        if block.refs:
            return
        if not block.keys:
            self.drop(block)
            return
        self.num_cached += 1
        self._eviction.offer(block)

    def take(self, table: BlockTable) -> int:
        """Return a fresh block, if possible the one after the table's last: contiguous blocks need no gathering.

        It has the slots that the table's next block needs. There must be room. Raises what copies for it raise.
        """
        if not self._free:
            self.evict_next(offload=True)
        after = table.blocks[-1] + 1 if table.blocks else 0
        id = after if after in self._free else self._free.smallest()
        self._groups.take(table, id, self._groups.next(table))
        self._free.discard(id)
        self._blocks[id].refs = 1
        return id

    def give_back(self, id: int) -> None:
        """Release a fresh block that is in no table."""
        self._groups.release(id, 0)
        self.release(self._blocks[id])

    def evict_next(self, offload: bool) -> None:
        """Evict the next block in the order of eviction. `offload`: into the host tier, if there is one."""
        self.evict(self._blocks[self._eviction.next()], offload)

    def evict(self, block: Block, offload: bool) -> None:
        """Evict a cached block. Raises what a copy raises; then it stays."""
        if offload:
            self._host.offload(block)
        self.num_cached -= 1
        self.drop(block)

    def drop(self, block: Block) -> None:
        """Free a block that no table holds; it leaves the tree unless others follow it."""
        self._groups.drop(block.id)
        self._free.add(block.id)
        self._blocks[block.id] = Block(block.id)
        self._eviction.forget(block)
        block.id, parent = GONE, block.parent
        self._eviction.offer(self._index.prune(block))
        self._states.leave(block, parent)

    def check(self, refs: Sequence[int]) -> None:
        """Raise AssertionError unless each block has so many holders as in `refs`, and is free, held or cached."""
        cached = count_cached(self._blocks, refs, self._free, self._groups, self._index.has_window)
        assert cached == self.num_cached, (
            f"{self.num_cached} blocks are counted as cached, there are {cached}"
        )
