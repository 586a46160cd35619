"""The index of evicted blocks in host memory: which are there, and in which slots. Pure Python, no tensors.

A block on the device is found by its parent's id, but ids are used again, and offloaded blocks outlive them. So every
full block gets a *name* when it enters the prefix index: a number that is never used twice, and that its copies keep.
An offloaded block is found by (name of its parent, keys of its rows), which amounts to the chain of keys from the
root: exact, with no hash that could collide. A block that is computed again takes the name of its offloaded copy.

A block may have rows in several groups (`engine/cache/groups.py`): what it has in each is copied when it is lost
there, and takes slots of its own. So do the states of recurrent layers after its rows.

A block that was brought back keeps its slots, so evicting it again copies nothing. If slots run out, the block that
was offloaded or brought back longest ago is dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.cache.copies import STATES

ROOT_NAME = 0


@dataclass(slots=True, eq=False)
class Offloaded:
    """A block in host memory. `name` is ROOT_NAME if the block is not full."""

    name: int
    parent: int
    keys: tuple[Hashable, ...]
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The slots of each group whose rows are there, and of STATES; empty once it is dropped."""


class HostTier:
    """The index of the host memory. Not thread-safe: it belongs to the engine's loop."""

    def __init__(
        self,
        grow: Callable[[], int] = lambda: 0,
        size: Callable[[int, int], int] = lambda group, row: 1,
    ) -> None:
        """`grow` allocates more memory and returns the number of new slots; 0 if there are none now (the default).
        `size` returns how many slots a block takes in a group, or STATES after a row of their path."""
        self._grow = grow
        self._size = size
        self._capacity = 0
        self._free: list[int] = []
        self._children: dict[int, dict[tuple[Hashable, ...], Offloaded]] = {}
        self._by_age: OrderedDict[Offloaded, None] = OrderedDict()
        self._names = count(ROOT_NAME + 1)
        self.num_states = 0
        """Blocks with the states after their rows."""
        self.restored_rows = 0
        """Rows brought back so far instead of being computed."""

    def __len__(self) -> int:
        return len(self._by_age)

    def name(self, parent: int, keys: tuple[Hashable, ...]) -> int:
        """Return the name of a full block that enters the prefix index."""
        known = self.find(parent, keys)
        return known.name if known is not None else next(self._names)

    def find(self, parent: int, keys: tuple[Hashable, ...]) -> Offloaded | None:
        """Return the block with exactly these rows."""
        return self._children.get(parent, {}).get(keys)

    def put(
        self,
        name: int,
        parent: int,
        keys: tuple[Hashable, ...],
        write: Callable[[tuple[int, ...]], None],
        group: int = 0,
        row: int = 0,
    ) -> None:
        """Have `write` copy the rows of a block in a group to slots, unless a copy exists already or there is no room.

        `row` is that of states, for which `group` is STATES.
        Raises what `write` raises; then the tier does not hold these rows.
        """
        siblings = self._children.get(parent, {})
        others = [siblings[keys]] if keys in siblings else list(siblings.values()) if group != STATES else []
        for other in others:
            if other.keys[: len(keys)] == keys and group in other.slots:
                self._by_age.move_to_end(other)
                return
            is_less = len(other.keys) < len(keys) and keys[: len(other.keys)] == other.keys
            if is_less and STATES not in other.slots:
                self.drop(other)  # an earlier copy of the same block with fewer rows
        block = siblings.get(keys) or Offloaded(name, parent, keys)
        slots = self._take(self._size(group, row), block)
        if slots is None:
            return
        try:
            write(slots)
        except BaseException:
            self._free.extend(slots)
            raise
        block.slots[group] = slots
        self.num_states += group == STATES
        self._children.setdefault(parent, {})[keys] = block
        self._by_age[block] = None
        self._by_age.move_to_end(block)

    def follow(self, name: int, keys: Sequence[Hashable], size: int) -> list[tuple[Offloaded, int]]:
        """Return the blocks that continue a path after the block `name` with the rows `keys`, and the rows that match.

        `size` is the number of rows of a block. Only the last block may match in part. Changes nothing.
        """
        chain: list[tuple[Offloaded, int]] = []
        for start in range(0, len(keys), size):
            rest = tuple(keys[start : start + size])
            found = self.find(name, rest)
            if found is None or 0 not in found.slots:
                found, rows = self.begin(name, rest, (0,))
                return chain if found is None else [*chain, (found, rows)]
            chain.append((found, len(rest)))
            name = found.name
            if len(rest) < size:
                break
        return chain

    def begin(
        self, name: int, keys: Sequence[Hashable], groups: Sequence[int]
    ) -> tuple[Offloaded | None, int]:
        """Return the block after the block `name` that has the most of the rows `keys`, in all of `groups`, and how
        many; (None, 0) without one."""
        best, best_rows = None, 0
        for block in self._children.get(name, {}).values():
            rows = common_prefix(block.keys, keys)
            if rows > best_rows and all(group in block.slots for group in groups):
                best, best_rows = block, rows
        return best, best_rows

    def states(self, name: int, keys: Sequence[Hashable]) -> list[Offloaded]:
        """Return the states after some of the first rows `keys` that follow the block `name`, the latest first."""
        found = [
            block
            for block in self._children.get(name, {}).values()
            if STATES in block.slots and block.keys == tuple(keys[: len(block.keys)])
        ]
        return sorted(found, key=lambda block: len(block.keys), reverse=True)

    def touch(self, chain: Sequence[Offloaded]) -> None:
        """Mark these blocks as used now; the beginning of a path is dropped last."""
        for block in reversed(chain):
            self._by_age.move_to_end(block)

    def remove(self, name: int, parent: int, keys: tuple[Hashable, ...]) -> bool:
        """Drop the copy of a block, if there is one, and the states after its rows. Return False, changing nothing, if
        offloaded blocks follow it."""
        following = list(self._children.get(name, {}).values()) if name != ROOT_NAME else []
        if any(block.slots.keys() != {STATES} for block in following):
            return False
        for block in following:
            self.drop(block)
        if (own := self.find(parent, keys)) is not None:
            self.drop(own)
        return True

    def forget(self, chain: Sequence[tuple[Offloaded, int]], start: int) -> None:
        """Drop the blocks of a path from index `start` on that no other path needs."""
        for block, rows in reversed(chain[max(start, 0) :]):
            if rows < len(block.keys) or not self.remove(block.name, block.parent, block.keys):
                break

    def drop(self, block: Offloaded) -> None:
        """Drop a block and free its slots."""
        del self._by_age[block]
        siblings = self._children[block.parent]
        del siblings[block.keys]
        if not siblings:
            del self._children[block.parent]
        self._free.extend(slot for slots in block.slots.values() for slot in slots)
        self.num_states -= STATES in block.slots
        block.slots.clear()

    def clear(self) -> None:
        """Drop everything."""
        for block in list(self._by_age):
            self.drop(block)

    def end(self) -> None:
        """Drop everything and take no more blocks: the memory is gone."""
        self.clear()
        self._free, self._capacity, self._grow = [], 0, lambda: 0

    def _take(self, count: int, block: Offloaded) -> tuple[int, ...] | None:
        """Return free slots, dropping the oldest blocks but `block` for them; None if there are not so many."""
        while len(self._free) < count and (more := self._grow()):
            self._free.extend(reversed(range(self._capacity, self._capacity + more)))
            self._capacity += more
        if count > self._capacity - sum(map(len, block.slots.values())):
            return None
        while len(self._free) < count:
            self.drop(next(other for other in self._by_age if other is not block))
        return tuple(self._free.pop() for _ in range(count))

    def check(self, full: Sequence[tuple[int, int, tuple[Hashable, ...]]]) -> None:
        """Raise AssertionError unless every slot is free or belongs to one block, and every block has one name.

        `full` are the full blocks on the device: name, parent's name, keys.
        """
        held = [(group, slots) for block in self._by_age for group, slots in block.slots.items()]
        assert all(len(slots) == self._size(group, 0) for group, slots in held if group != STATES)
        slots = [slot for _, own in held for slot in own] + self._free
        assert sorted(slots) == list(range(self._capacity)), "a slot is lost, or of two blocks"
        assert all(block.slots for block in self._by_age), "a block has no rows"
        assert self.num_states == sum(group == STATES for group, _ in held)
        found = [block for siblings in self._children.values() for block in siblings.values()]
        assert set(found) == set(self._by_age), "an offloaded block cannot be found"
        assert len(found) == len(self._by_age)
        for block in found:
            assert self._children[block.parent][block.keys] is block, (
                f"the block in slots {block.slots} is found by other keys"
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
