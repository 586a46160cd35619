"""The slots of a group of layers with a window of its own. Pure Python, no tensors.

    block    0 1 2 3 4 5          the blocks of the primary group, whose ids are its slots
    slot     . . 0 2 1 .          the slots of this group: fewer, and only for blocks that some window may still see

A table holds a block in this group only while its next row sees it. The slot of a block that no table holds here stays
with the block until another block needs it: those that are not spared first, then the least recently used.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.cache.min_set import MinSet
from engine.cache.window import Window

Rank = tuple[float, int, int]
"""0, or more for a spared block; the time of last use; the block's id. The smallest loses its slot first."""


@dataclass(slots=True)
class _Place:
    slot: int
    refs: int = 0
    """How many tables hold the block in this group."""
    last_used: int = 0
    is_end: bool = False
    """Whether a table ended that needed its rows here, so that somebody may go on there."""


class GroupPool:
    """Gives `num_slots` slots to blocks of the primary group. It belongs to the block manager."""

    def __init__(self, num_slots: int, window: Window) -> None:
        """Begin with every slot free. Raises ValueError unless there is one."""
        if num_slots < 1:
            raise ValueError("num_slots must be at least 1")
        self.num_slots = num_slots
        self.window = window
        self.blank = num_slots
        """The blank slot, which stands for blocks that have none; nothing writes to it."""
        self._places: dict[int, _Place] = {}
        self._free = MinSet(range(num_slots))
        self._unheld: MinSet[Rank] = MinSet()
        self._spared: dict[int, float] = {}
        self.lose: Callable[[int], None] = lambda block: None
        """Called before a block loses its slot to another one; an error from it ends `take`."""

    def slot(self, block: int) -> int:
        """Return the slot of a block, or `blank`."""
        place = self._places.get(block)
        return self.blank if place is None else place.slot

    def mirror(self, slots: Mapping[int, int]) -> None:
        """Know the slots that blocks have in the pool of another process, and no others."""
        self._places = {block: _Place(slot) for block, slot in slots.items()}

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def room(self, idle: bool = False) -> int:
        """Return how many blocks can be given a slot. `idle`: without taking one from a spared block."""
        spared = sum(rank[0] >= 1 for rank in self._unheld) if idle and self._spared else 0
        return len(self._free) + len(self._unheld) - spared

    @property
    def num_free(self) -> int:
        """Slots that no block has."""
        return len(self._free)

    def is_held(self, block: int) -> bool:
        """Return whether any table holds `block` in this group."""
        place = self._places.get(block)
        return place is not None and place.refs > 0

    def is_end(self, block: int) -> bool:
        """Return whether `block` has a slot that a table needed at its end."""
        place = self._places.get(block)
        return place is not None and place.is_end

    def take(self, block: int) -> int | None:
        """Give `block`, which has no slot, one that a table holds. Return the block that lost its slot for it, if any.

        Raises IndexError without room; nothing is changed then.
        """
        loser = None
        if not self._free:
            loser = self._unheld.smallest()[-1]
            self.lose(loser)
            self.drop(loser)
        slot = self._free.smallest()
        self._free.discard(slot)
        self._places[block] = _Place(slot, refs=1)
        return loser

    def hold(self, block: int) -> None:
        """Note that one more table holds `block`, which has a slot."""
        place = self._places[block]
        self._unheld.discard(self._rank(block))
        place.refs += 1

    def release(self, block: int, now: int, is_end: bool = False) -> None:
        """Note that one table fewer holds `block`, last used at the time `now`. Its slot stays until it is needed.

        `is_end`: the table ended and would have needed these rows to go on.
        """
        place = self._places[block]
        place.refs -= 1
        place.is_end = place.is_end or is_end
        place.last_used = now
        if not place.refs:
            self._unheld.add(self._rank(block))

    def is_spared(self, block: int) -> bool:
        """Return whether `block` is spared to any degree."""
        return block in self._spared

    def spare(self, degrees: Mapping[int, float]) -> None:
        """Spare the blocks in `degrees` alone, each more the higher its number; below 1, idle work may take it."""
        changed = {block for block, _ in self._spared.items() ^ degrees.items()} & self._places.keys()
        unheld = [block for block in changed if not self._places[block].refs]
        for block in unheld:
            self._unheld.discard(self._rank(block))
        self._spared = dict(degrees)
        for block in unheld:
            self._unheld.add(self._rank(block))

    def drop(self, block: int) -> None:
        """Free the slot of `block`, which no table holds here, if it has one."""
        place = self._places.get(block)
        if place is None:
            return
        assert not place.refs, f"block {block} is held"
        self._unheld.discard(self._rank(block))
        del self._places[block]
        self._free.add(place.slot)

    def forget(self, block: int) -> None:
        """Spare `block`, which has no slot, no longer: its id will be that of another block."""
        assert block not in self._places, f"block {block} has a slot"
        self._spared.pop(block, None)

    def move(self, source: int, target: int) -> None:
        """Give the slot of `source`, which is held, and its holders to `target`, an equal block that has none."""
        assert target not in self._places, f"block {target} has a slot"
        self._places[target] = self._places.pop(source)

    def check(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless each block is held as often as in `held`, every slot is free or one block's, and
        the unheld ones are in order.
        """
        slots = [place.slot for place in self._places.values()]
        assert sorted([*slots, *self._free]) == list(range(self.num_slots)), "a slot is lost or given twice"
        unheld = {self._rank(block) for block, place in self._places.items() if not place.refs}
        assert set(self._unheld) == unheld, "a slot can be taken back that must not, or cannot"
        refs = {block: place.refs for block, place in self._places.items() if place.refs}
        assert refs == Counter(held), "a slot is held too often or not often enough"

    def _rank(self, block: int) -> Rank:
        return self._spared.get(block, 0), self._places[block].last_used, block
