"""The index of evicted blocks in host memory: which are there, and in which slot. Pure Python, no tensors.

A block on the device is found by its parent's id, but ids are used again, and offloaded blocks outlive them. So every
full block gets a *name* when it enters the prefix index: a number that is never used twice, and that its copies keep.
An offloaded block is found by (name of its parent, keys of its rows), which amounts to the chain of keys from the
root: exact, with no hash that could collide. A block that is computed again takes the name of its offloaded copy.

A block that was brought back keeps its slot, so evicting it again copies nothing. If slots run out, the block that
was offloaded or brought back longest ago is dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count

ROOT_NAME = 0


@dataclass(slots=True, eq=False)
class Offloaded:
    """A block in host memory. `slot` is -1 once it is dropped; `name` is ROOT_NAME if the block is not full."""

    name: int
    parent: int
    keys: tuple[Hashable, ...]
    slot: int


class HostTier:
    """The index of the host memory. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, grow: Callable[[], int] = lambda: 0) -> None:
        """`grow` allocates more memory and returns the number of new slots; 0 if there are none now (the default)."""
        self._grow = grow
        self._capacity = 0
        self._free: list[int] = []
        self._children: dict[int, dict[tuple[Hashable, ...], Offloaded]] = {}
        self._by_age: OrderedDict[Offloaded, None] = OrderedDict()
        self._names = count(ROOT_NAME + 1)
        self.restored_rows = 0
        """Rows brought back so far instead of being computed."""

    def __len__(self) -> int:
        return len(self._by_age)

    def name(self, parent: int, keys: tuple[Hashable, ...]) -> int:
        """Return the name of a full block that enters the prefix index."""
        known = self._children.get(parent, {}).get(keys)
        return known.name if known is not None else next(self._names)

    def put(self, name: int, parent: int, keys: tuple[Hashable, ...], write: Callable[[int], None]) -> None:
        """Have `write` copy an evicted block to a slot, unless a copy exists already or there is no room.

        Raises what `write` raises; then the tier does not hold the block.
        """
        siblings = self._children.get(parent, {})
        for other in [siblings[keys]] if keys in siblings else list(siblings.values()):
            if other.keys[: len(keys)] == keys:
                self._by_age.move_to_end(other)
                return
            if keys[: len(other.keys)] == other.keys:
                self.drop(other)  # an earlier copy of the same block with fewer rows
        slot = self._slot()
        if slot is None:
            return
        try:
            write(slot)
        except BaseException:
            self._free.append(slot)
            raise
        block = Offloaded(name, parent, keys, slot)
        self._children.setdefault(parent, {})[keys] = block
        self._by_age[block] = None

    def follow(self, name: int, keys: Sequence[Hashable], size: int) -> list[tuple[Offloaded, int]]:
        """Return the blocks that continue a path after the block `name` with the rows `keys`, and the rows that match.

        `size` is the number of rows of a block. Only the last block may match in part. Changes nothing.
        """
        chain: list[tuple[Offloaded, int]] = []
        for start in range(0, len(keys), size):
            rest = tuple(keys[start : start + size])
            siblings = self._children.get(name, {})
            found = siblings.get(rest)
            if found is None:
                ranked = [(common_prefix(block.keys, rest), block) for block in siblings.values()]
                rows, found = max(ranked, key=lambda pair: pair[0], default=(0, None))
                return chain if found is None or rows == 0 else [*chain, (found, rows)]
            chain.append((found, len(rest)))
            name = found.name
            if len(rest) < size:
                break
        return chain

    def touch(self, chain: Sequence[tuple[Offloaded, int]]) -> None:
        """Mark these blocks as used now; the beginning of a path is dropped last."""
        for block, _ in reversed(chain):
            self._by_age.move_to_end(block)

    def remove(self, name: int, parent: int, keys: tuple[Hashable, ...]) -> bool:
        """Drop the copy of a block, if there is one. Return False, changing nothing, if offloaded blocks follow it."""
        if name != ROOT_NAME and name in self._children:
            return False
        if (block := self._children.get(parent, {}).get(keys)) is not None:
            self.drop(block)
        return True

    def forget(self, chain: Sequence[tuple[Offloaded, int]], start: int) -> None:
        """Drop the blocks of a path from index `start` on that no other path needs."""
        for block, rows in reversed(chain[max(start, 0) :]):
            if rows < len(block.keys) or not self.remove(block.name, block.parent, block.keys):
                break

    def drop(self, block: Offloaded) -> None:
        """Drop a block and free its slot."""
        del self._by_age[block]
        siblings = self._children[block.parent]
        del siblings[block.keys]
        if not siblings:
            del self._children[block.parent]
        self._free.append(block.slot)
        block.slot = -1

    def clear(self) -> None:
        """Drop everything."""
        for block in list(self._by_age):
            self.drop(block)

    def end(self) -> None:
        """Drop everything and take no more blocks: the memory is gone."""
        self.clear()
        self._free, self._capacity, self._grow = [], 0, lambda: 0

    def _slot(self) -> int | None:
        if not self._free:
            more = self._grow()
            self._free.extend(reversed(range(self._capacity, self._capacity + more)))
            self._capacity += more
        if not self._free and self._by_age:
            self.drop(next(iter(self._by_age)))
        return self._free.pop() if self._free else None

    def check(self, full: Sequence[tuple[int, int, tuple[Hashable, ...]]]) -> None:
        """Raise AssertionError unless every slot is free or belongs to one block, and every block has one name.

        `full` are the full blocks on the device: name, parent's name, keys.
        """
        slots = [block.slot for block in self._by_age] + self._free
        assert sorted(slots) == list(range(self._capacity)), "a slot is lost, or of two blocks"
        found = [block for siblings in self._children.values() for block in siblings.values()]
        assert set(found) == set(self._by_age), "an offloaded block cannot be found"
        assert len(found) == len(self._by_age)
        for block in found:
            assert self._children[block.parent][block.keys] is block, (
                f"slot {block.slot} is found by other keys"
            )
        identities = dict.fromkeys(full) | {(b.name, b.parent, b.keys): None for b in found if b.name}
        names = [name for name, _, _ in identities]
        assert ROOT_NAME not in names, "a full block has no name"
        assert len(set(names)) == len(names), "two blocks have one name"
        assert len({(parent, keys) for _, parent, keys in identities}) == len(names), "a block has two names"


def common_prefix(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return how many leading keys are equal."""
    rows = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        rows += 1
    return rows
