"""What the cache remembers of recurrent layers: states at exact rows of known paths. Pure Python, no tensors.

A recurrence has one state of fixed size, and cannot go back. So states are kept in *slots*, each with the states of all
recurrent layers after some row. A table has a live state in a slot that it may write to; a *mark* is a state that hangs
on the prefix tree and is never written to again:

    rows    0 1 2 3 | 4 5 6 7 | 8 9
    marks             ^4    ^6    ^9        after 4, 6 and 9 rows
    log             | 4 5 6 7 | 8 9         the inputs of the recurrences, in a group of the cache

From a mark, a later row is reached by reading the log alone, without the rest of the network. The convolution of a
recurrence sees `tail` earlier rows, so a prefix of r rows can be resumed if there is a mark at m <= r and the log has
the rows from m - tail to r.

Nothing is ever copied. A table that resumes at a mark shares its slot; its next step reads that slot and writes another
one. Where a state becomes a mark, the table shares its slot from then on.

If slots run out, a mark is given up: first one whose rows in the log are lost, then the least recently used outside
named paths, then, of a named path, the one that saves the fewest rows for its distance from the end: there marks get
thinner towards the beginning. Idle work gives up marks of named paths only if these have more than half of the slots.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.batch import NONE
from engine.cache.block import Block, Key
from engine.cache.block_table import BlockTable
from engine.cache.group_pool import GroupPool
from engine.cache.live_state import LiveState, Mark, StatePlan
from engine.cache.min_set import MinSet

LOG_ROWS = 64
"""So many rows before the end of a sequence can be reached again by reading the log."""
BRIEF = 2
"""The marks of a running answer that are kept to go back a few rows."""

Place = tuple[Block, tuple[Key, ...]]
"""Where a mark hangs: the fields `parent` and `keys`."""


class Marks:
    """The slots of states. It belongs to the block manager."""

    def __init__(self, num_slots: int, tail: int, log: GroupPool, block_size: int) -> None:
        """Begin with every slot free. Raises ValueError unless there is one."""
        if num_slots < 1:
            raise ValueError("num_slots must be at least 1")
        self.num_slots = num_slots
        self.tail = tail
        self.log = log
        self._size = block_size
        self._free = MinSet(range(num_slots))
        self._refs = [0] * num_slots
        """How many marks and tables, or the plans of these, hold each slot."""
        self._on: dict[Block, dict[tuple[Key, ...], Mark]] = {}
        self._count = 0
        self._named = 0
        """How many marks are on named paths."""
        self.lose: Callable[[Mark], None] = lambda mark: None
        """Called before a mark is given up for its slot; an error from it ends the operation."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Mark]:
        return (mark for marks in self._on.values() for mark in marks.values())

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    # -- look-ups

    def first(self, row: int) -> int:
        """Return the first block whose rows in the log are needed to go on from a state after `row` rows."""
        return max(row - self.tail, 0) // self._size

    def along(self, line: Sequence[Block], keys: Sequence[Key]) -> Iterator[Mark]:
        """Yield the marks on the path of `keys`, the latest first. `line` are the root and its full blocks."""
        for count in range(len(line) - 1, -1, -1):
            found = self._on.get(line[count])
            if found:
                rest = tuple(keys[count * self._size : (count + 1) * self._size])
                marks = [mark for own, mark in found.items() if own == rest[: len(own)]]
                yield from sorted(marks, key=lambda mark: mark.row, reverse=True)

    def resume(
        self, line: Sequence[Block], rows: int, keys: Sequence[Key], is_open: bool = True
    ) -> tuple[int, Mark | None]:
        """Return the last row, at most `rows`, where the path of `keys` can be resumed, and the mark to go on from.

        `line` are the root and the path's full blocks; `is_open` says whether the block after them is in the log.
        """
        blocks = [block.id in self.log for block in line[1:]] + [is_open]
        for mark in (*self.along(line, keys), None):
            row = mark.row if mark is not None else 0
            if row > rows:
                continue
            end = self.first(row)
            while end < len(blocks) and blocks[end]:
                end += 1
            if (reached := min(end * self._size, rows)) >= row:
                return reached, mark
        raise AssertionError("any path can be resumed before its first row")

    def support(self, mark: Mark) -> list[list[Block]]:
        """Return the blocks that the log needs for a mark: of each list, one block is enough."""
        found = []
        if mark.keys:
            count = len(mark.keys)
            found.append([block for block in mark.parent.children if tuple(block.keys[:count]) == mark.keys])
        block, first = mark.parent, self.first(mark.row)
        while block.depth > first and block.parent is not None:
            found.append([block])
            block = block.parent
        return found

    def is_usable(self, mark: Mark) -> bool:
        """Return whether a sequence can go on from a mark."""
        return self.log_blocks(mark) is not None

    def needed(self, mark: Mark, path: Sequence[Block] = ()) -> list[Block]:
        """Return the blocks whose rows in the log a mark needs, with those of `path` that can be reached from it."""
        around = path[self.first(mark.row) : (mark.row + LOG_ROWS) // self._size + 1]
        return [*(block for blocks in self.support(mark) for block in blocks), *around]

    # -- tables

    def open(self, mark: Mark | None, now: int, fork: int) -> LiveState:
        """Return the state of a table that goes on from a mark, or from the first row. `fork`: as in `LiveState`."""
        if mark is None:
            return LiveState(fork=fork)
        mark.last_used = now
        self._refs[mark.slot] += 1
        return LiveState(mark.slot, mark.row, fork)

    def adopt(self, table: BlockTable, idle: bool) -> bool:
        """Give `table`, which has none, a slot for the state after its rows, yet to be written: it is lost if the table
        ends with that slot as its target. Return False if there is no slot."""
        slot = self._take(idle)
        if slot is None:
            return False
        self._refs[slot] += 1
        table.state = LiveState(slot, table.length, target=slot, stop=table.length)
        return True

    def plan(self, table: BlockTable, plan: StatePlan) -> bool:
        """Plan the states of a table's next step. Return False if there is no slot."""
        state, start = table.state, table.length
        assert state is not None
        self._drop_plan(state)
        own = state.slot != NONE and self._refs[state.slot] == 1 and not plan.keeps
        target = state.slot if own else self._take(plan.idle)
        if target is None and state.slot != NONE and not plan.keeps:
            target = self._take_over(state.slot, plan.idle)
        if target is None:
            return False
        if target != state.slot:
            self._refs[target] += 1
        state.target, state.stop, state.is_brief = target, start + plan.rows, plan.is_brief
        major = {*plan.at, state.fork} if not plan.is_brief else {state.fork}
        wanted = sorted({row for row in (*plan.at, *plan.spaced, state.fork) if start < row <= state.stop})
        state.minor = frozenset(wanted) - major
        state.marks_stop = state.stop in wanted
        for row in wanted[: len(wanted) - state.marks_stop]:
            slot = self._take(plan.idle)
            if slot is None:
                break
            self._refs[slot] += 1
            state.saves.append((row, slot))
        return True

    def settle(self, table: BlockTable, place: Callable[[int], Place], now: int) -> bool:
        """Note that the planned step of a table is done, if its rows are committed. Return whether there are new marks.

        `place` returns where a mark at a row of the table hangs.
        """
        state = table.state
        if state is None or state.target == NONE or table.length < state.stop:
            return False
        taken = bool(state.saves)
        for row, slot in state.saves:
            self._hang(place(row), row, slot, now, row in state.minor)
        if state.slot not in (NONE, state.target):
            self._release(state.slot)
        state.slot, state.row, state.target = state.target, state.stop, NONE
        state.saves.clear()
        if state.marks_stop:
            taken = True
            self._refs[state.slot] += 1
            mark = self._hang(place(state.row), state.row, state.slot, now, state.row in state.minor)
            if state.is_brief and mark is not None:
                state.brief.append(mark)
                self._thin(state)
        return taken

    def close(self, table: BlockTable, place: Callable[[int], Place], now: int) -> bool:
        """Make a mark of the state of a table that ends. Return whether there is a new one.

        A state that a step was to write, and has not, is lost.
        """
        state, table.state = table.state, None
        if state is None:
            return False
        is_lost = state.slot == state.target
        self._drop_plan(state)
        if state.slot == NONE:
            return False
        if is_lost or state.row > table.length:
            self._release(state.slot)
            return False
        return self._hang(place(state.row), state.row, state.slot, now) is not None

    # -- marks

    def spare(self, paths: Iterable[tuple[int, Sequence[Mark], int]]) -> None:
        """Give up the marks of these paths last. Each path has a degree, its marks in order, and its number of rows."""
        for mark in self:
            mark.degree, mark.worth = 0, 0.0
        for degree, marks, rows in paths:
            before = 0
            for mark in marks:
                mark.degree = degree
                mark.worth = (mark.row - before) / (max(rows - mark.row, 0) + self._size)
                before = mark.row
        self._named = sum(mark.degree > 0 for mark in self)

    def leave(self, block: Block, parent: Block | None) -> None:
        """Give up the marks of a block that has left the tree or has fewer rows, where no other block has them."""
        if not block.indexed:
            for mark in list(self._on.get(block, {}).values()):
                self.drop(mark)
        for mark in list(self._on.get(parent, {}).values()) if parent is not None else ():
            if mark.keys and not self.support(mark)[0]:
                self.drop(mark)

    def leaving(self, block: Block) -> list[Mark]:
        """Return the marks that `leave` gives up when a block leaves the tree."""
        beside = self._on.get(block.parent, {}).values() if block.parent is not None else ()
        return [
            *self._on.get(block, {}).values(),
            *(mark for mark in beside if mark.keys and self.support(mark)[0] == [block]),
        ]

    def log_blocks(self, mark: Mark) -> list[Block] | None:
        """Return the blocks whose rows in the log a mark needs, in order; None if they are not all there."""
        found = [
            next((block for block in blocks if block.id in self.log), None) for blocks in self.support(mark)
        ]
        return [block for block in found[::-1] if block is not None] if None not in found else None

    def needing(self, block: Block) -> list[Mark]:
        """Return the marks that need the rows of a block in the log."""
        return [mark for mark in self if any(block in blocks for blocks in self.support(mark))]

    def drop(self, mark: Mark) -> None:
        """Give up a mark. Its slot is free once no table holds it."""
        marks = self._on[mark.parent]
        del marks[mark.keys]
        self._count -= 1
        self._named -= mark.degree > 0
        if not marks:
            del self._on[mark.parent]
        self._release(mark.slot)

    def _hang(self, place: Place, row: int, slot: int, now: int, is_minor: bool = False) -> Mark | None:
        """Make a mark that holds `slot`. Return None if there is one already: then `slot` is released."""
        parent, keys = place
        marks = self._on.setdefault(parent, {})
        if (known := marks.get(keys)) is not None:
            known.last_used = now
            known.is_minor = known.is_minor and is_minor
            self._release(slot)
            return None
        marks[keys] = mark = Mark(slot, row, parent, keys, now, is_minor=is_minor)
        self._count += 1
        return mark

    def _thin(self, state: LiveState) -> None:
        while len(state.brief) > BRIEF:
            mark = state.brief.pop(0)
            if self._on.get(mark.parent, {}).get(mark.keys) is mark:
                self.drop(mark)

    # -- slots

    def _take(self, idle: bool) -> int | None:
        """Return a free slot, giving up a mark for it if need be; None if there is none."""
        if not self._free:
            marks = [mark for mark in self if self._refs[mark.slot] == 1 and self._may_go(mark, idle)]
            if not marks:
                return None
            self._give_up(min(marks, key=self._rank))
        slot = self._free.smallest()
        self._free.discard(slot)
        return slot

    def _take_over(self, slot: int, idle: bool) -> int | None:
        """Return `slot` for the one table that goes on from its mark, which is given up; None if that may not be."""
        marks = [mark for mark in self if mark.slot == slot and self._may_go(mark, idle)]
        if not marks or self._refs[slot] > 2:
            return None
        self._give_up(marks[0])
        return slot

    def _may_go(self, mark: Mark, idle: bool) -> bool:
        """Return whether a mark may be given up, for idle work or a person."""
        return not idle or not mark.degree or self._named > self.num_slots // 2

    def _give_up(self, mark: Mark) -> None:
        self.lose(mark)
        self.drop(mark)

    def _rank(self, mark: Mark) -> tuple[bool, int, float, int]:
        """Return the place of a mark in the order in which they are given up, the smallest first."""
        return self.is_usable(mark), mark.degree, mark.worth, mark.last_used

    def _drop_plan(self, state: LiveState) -> None:
        if state.target not in (NONE, state.slot):
            self._release(state.target)
        for _, slot in state.saves:
            self._release(slot)
        state.target = NONE
        state.saves.clear()

    def _release(self, slot: int) -> None:
        self._refs[slot] -= 1
        if not self._refs[slot]:
            self._free.add(slot)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError unless the slots are held as marks and tables say, and marks hang on known paths."""
        refs = [0] * self.num_slots
        for mark in self:
            refs[mark.slot] += 1
            assert self._on[mark.parent][mark.keys] is mark
            assert mark.row == mark.parent.depth * self._size + len(mark.keys) > 0
            assert len(mark.keys) < self._size
            assert mark.parent.depth == 0 or mark.parent.indexed, "a mark hangs on a block that has gone"
            assert not mark.keys or self.support(mark)[0], "nothing has the rows before a mark"
        for table in tables:
            state = table.state
            if state is None:  # its blocks are being brought back
                continue
            assert state.row <= table.length, "a state has seen rows that its table has not"
            held = {state.slot, state.target} - {NONE}
            for slot in (*held, *(slot for _, slot in state.saves)):
                refs[slot] += 1
        assert sum(1 for _ in self) == len(self)
        assert refs == self._refs, "a slot is held too often or not often enough"
        free = {slot for slot in range(self.num_slots) if not refs[slot]}
        assert set(self._free) == free, "a slot is lost, or free and held"
