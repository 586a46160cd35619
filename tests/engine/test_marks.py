"""BlockManager with marks: a table goes on from a state and a log that its own path left, whatever was given up."""

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest

from engine.batch import NONE
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.copies import STATES, Copy, Offload, OffloadStates, Restore, RestoreStates, RowCopy
from engine.cache.group_pool import GroupPool
from engine.cache.live_state import StatePlan
from engine.cache.marks import LOG_ROWS, Marks
from engine.cache.offload import HostTier
from engine.cache.rows import Rows
from engine.cache.window import Window
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Priority, SequenceStatus
from engine.schedule.sequence import Sequence as Asked
from tests.fresh import seeds

SIZE, STEP = 4, 6
TORN = (-1,)


class CopyError(Exception):
    pass


class Memory:
    """What each slot holds: of a state the path that led to it, of the log the same for each row."""

    def __init__(
        self,
        blocks: int,
        log: int,
        states: int,
        tail: int = 3,
        size: int = SIZE,
        others: Iterable[GroupPool] = (),
        host: Iterable[int] | None = None,
    ) -> None:
        """`host` are the sizes of the pieces of host memory, if there is any."""
        self.size, self.tail = size, tail
        self.pool = GroupPool(log, Window(LOG_ROWS + tail, STEP))
        self.marks = Marks(states, tail, self.pool, size)
        self.log: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {NONE: ()}
        left = [*(host or ())]
        tier = None
        if host is not None:
            tier = HostTier(
                lambda: left.pop(0) if left else 0, lambda kind, row: 2 + row % 3 if kind == STATES else 1
            )
        self.manager = BlockManager(
            blocks, size, self.copy, tier, pools=[*others, self.pool], marks=self.marks
        )
        self.replayed = 0
        self.host: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {}
        self.fails_in = -1
        """So many copies from now on the one comes that fails; -1: none."""

    def copy(self, copy: Copy) -> None:
        """Carry it out, or fail and leave the target in pieces."""
        fails, self.fails_in = self.fails_in == 0, max(self.fails_in - 1, -1)
        if isinstance(copy, RowCopy):
            logs = self.pool.slot(copy.source), self.pool.slot(copy.target)
            for memory, (source, target) in ((self.rows, (copy.source, copy.target)), (self.log, logs)):
                for row in range(copy.rows if memory is self.rows or copy.target in self.pool else 0):
                    memory[target * self.size + row] = TORN if fails else memory[source * self.size + row]
        else:
            places = self.places(copy)
            if isinstance(copy, Offload | OffloadStates):
                for held in [held for held in self.host if {*held} & {*copy.slots}]:
                    del self.host[held]
                found = [None if memory is None else memory.get(at) for memory, at in places]
                self.host[copy.slots] = [TORN] * len(found) if fails else found
            else:
                for (memory, at), held_row in zip(places, self.host[copy.slots], strict=True):
                    if memory is not None:
                        memory[at] = TORN if fails or held_row is None else held_row
        if fails:
            raise CopyError

    def places(
        self, copy: Offload | Restore | OffloadStates | RestoreStates
    ) -> list[tuple[dict[int, tuple[int, ...]] | None, int]]:
        """Where what a copy copies lies: the memory, or None for what is not looked at or not copied, and the place."""
        if isinstance(copy, Offload | Restore):
            own = self.rows if copy.group == 0 else None
            return [(own, copy.block * self.size + row) for row in range(self.size)]
        states = copy.states
        found: list[tuple[dict[int, tuple[int, ...]] | None, int]] = [(self.states, states.state)]
        first = self.marks.first(states.row)
        for row in range(first * self.size, states.row):
            block = states.blocks[row // self.size - first]
            memory = self.log if block != NONE else None
            found.append((memory, self.pool.slot(block) * self.size + row % self.size))
        return found

    def logged(self, table: BlockTable, row: int) -> int:
        return self.pool.slot(table.blocks[row // self.size]) * self.size + row % self.size

    def grow(
        self,
        table: BlockTable,
        keys: list[int],
        count: int,
        at: list[int] | None = None,
        idle: bool = False,
        guesses: int = 0,
        is_brief: bool = False,
    ) -> None:
        """Compute rows as a step does; the last `guesses` of them are committed alone and are not in the state."""
        start = table.length
        new = keys[start : start + count + guesses]
        sure = min(count, len(new))
        self.manager.reserve(table, len(new), idle)
        self.manager.states.plan(table, StatePlan(sure, tuple(at or ()), idle, is_brief))
        assert table.state is not None
        moves = table.state.moves
        state = self.states[moves.source]
        assert state == tuple(keys[: moves.row]), "a table goes on from the state of another path"
        for row in range(max(moves.row - self.tail, 0), start):
            assert self.log[self.logged(table, row)] == tuple(keys[: row + 1]), (
                "the log is that of another path"
            )
        self.replayed += start - moves.row
        for row in range(start, start + len(new)):
            self.log[self.logged(table, row)] = tuple(keys[: row + 1])
            self.rows[table.blocks[row // self.size] * self.size + row % self.size] = tuple(keys[: row + 1])
        for row, slot in moves.saves:
            self.states[slot] = tuple(keys[:row])
        self.manager.commit(table, new[:sure])
        for key in new[sure:]:
            self.manager.commit(table, [key])

    def make(self, keys: list[int], at: list[int] | None = None, step: int = STEP) -> int:
        """Make a path present. Return how many rows were computed for it."""
        table = self.manager.open(keys)
        computed = len(keys) - table.length
        while table.length < len(keys):
            self.grow(table, keys, step, at)
        self.manager.close(table)
        self.manager.check()
        return computed

    def restore(self, keys: list[int], fails: bool = False, idle: bool = False) -> None:
        """Bring back a path and the state after it, as from disk: without the log of its first blocks."""
        table = self.manager.open([])
        self.manager.go_along(table, keys)
        try:
            while (start := table.length) < len(keys):
                count = min(self.size - start % self.size, len(keys) - start)
                self.manager.reserve(table, count, idle)
                for row in range(start, start + count):
                    place = table.blocks[row // self.size] * self.size + row % self.size
                    self.rows[place] = tuple(keys[: row + 1])
                self.manager.commit(table, keys[start : start + count])
                self.manager.check()

            def fill(slot: int, blocks: Sequence[int]) -> None:
                self.states[slot] = (-1,) if fails else tuple(keys)
                first = len(table.blocks) - len(blocks)
                for row in range(first * self.size, len(keys)):
                    if blocks[row // self.size - first] == NONE:
                        continue
                    self.log[self.logged(table, row)] = (-1,) if fails else tuple(keys[: row + 1])
                if fails:
                    raise OSError

            self.manager.states.adopt(table, idle, fill)
            self.manager.check()
        finally:
            self.manager.close(table)
            self.manager.check()

    def check(self, table: BlockTable, keys: list[int]) -> None:
        for row in range(table.length):
            assert self.rows[table.blocks[row // self.size] * self.size + row % self.size] == tuple(
                keys[: row + 1]
            )


@pytest.mark.parametrize("seed", seeds(80))
@pytest.mark.parametrize("has_host", [False, True])
def test_a_table_goes_on_from_the_state_of_its_own_path(seed: int, has_host: bool) -> None:
    choose = random.Random(seed)
    size, tail = choose.choice([(2, 3), (4, 3), (4, 1), (4, 6)])
    log = choose.randint(3 * Window(LOG_ROWS + tail, STEP).most_blocks(size) // 2, 90)
    window = Window(choose.randint(1, 9), STEP)
    others = [GroupPool(choose.randint(3 * window.most_blocks(size), 40), window)] if seed % 3 == 0 else []
    host = [choose.randint(1, 20) for _ in range(choose.randint(1, 6))] if has_host else None
    memory = Memory(choose.randint(24, 60), log, choose.randint(3, 9), tail, size, others, host)
    manager = memory.manager
    tables: list[tuple[BlockTable, list[int]]] = []
    known: list[list[int]] = [[]]
    operations = [
        "open",
        "grow",
        "grow",
        "guess",
        "close",
        "fail",
        "restore",
        "pin",
        "keep",
        "forget",
        "evict",
    ]
    operations += ["offload", "fault"]
    for _ in range(300):
        with suppress(OutOfBlocksError, CopyError, OSError):
            match choose.choice(operations):
                case "open" if len(tables) < 3:
                    begin = choose.choice(known)
                    keys = begin[: choose.randint(0, len(begin))]
                    keys = (keys + [choose.randrange(2) for _ in range(choose.randint(1, 14))])[:40]
                    present = manager.match(keys)
                    manager.fits_beside(keys, len(keys), [(one, len(given)) for one, given in tables])
                    table = manager.open(keys, idle=choose.random() < 0.2)
                    assert table.length <= present
                    tables.append((table, keys))
                    known.append(keys)
                case "grow" if tables:
                    table, keys = choose.choice(tables)
                    at = [table.length + choose.randint(1, STEP) for _ in range(choose.randint(0, 3))]
                    idle = choose.random() < 0.3
                    memory.grow(table, keys, choose.randint(1, STEP), at, idle, 0, choose.random() < 0.5)
                case "guess" if tables:
                    table, keys = choose.choice(tables)
                    memory.grow(table, keys, 1, guesses=choose.randint(0, 3))
                case "fail" if tables:
                    table, keys = tables.pop(choose.randrange(len(tables)))
                    try:
                        manager.reserve(table, 1)
                        manager.states.plan(table, StatePlan(1, (table.length + 1,)))
                        assert table.state is not None
                        for _, slot in table.state.moves.saves:
                            memory.states[slot] = TORN
                    finally:
                        manager.close(table)
                case "close" if tables:
                    table, _ = tables.pop(choose.randrange(len(tables)))
                    manager.close(table)
                case "restore" if not others and known[1:]:
                    keys = choose.choice(known[1:])
                    keys = keys[: choose.randint(1, len(keys))]
                    memory.restore(keys, choose.random() < 0.2, choose.random() < 0.5)
                    assert manager.match(keys) == len(keys)
                case "pin":
                    manager.pin(choose.choice(known))
                case "keep":
                    manager.keep("a", choose.choice([None, *known]))
                case "forget":
                    keys = choose.choice(known)
                    manager.forget(keys, choose.randint(0, len(keys)))
                case "evict" if choose.random() < 0.1:
                    manager.evict_all()
                case "offload" if manager.num_cached:
                    manager._pool.evict_next(offload=True)
                case "fault" if has_host:
                    memory.fails_in = choose.randint(0, 4)
        manager.check()
        for table, keys in tables:
            memory.check(table, keys)


def test_a_prefix_is_resumed_at_a_mark_and_as_far_as_the_log_goes_from_there() -> None:
    memory = Memory(64, 60, 8)
    keys = list(range(40))
    assert memory.make(keys, at=[10]) == 40
    assert memory.manager.match(keys) == 40
    assert memory.manager.match([*keys[:10], 99]) == 10
    assert memory.manager.match([*keys[:30], 99]) == 30, "the log reaches back to the mark"
    assert memory.make([*keys[:30], 99]) == 1
    assert memory.replayed == 20, "from the mark, row by row, without the rest of the network"


def test_without_the_log_a_prefix_is_resumed_at_its_last_mark() -> None:
    memory = Memory(64, 20, 8)
    keys, others = list(range(40)), list(range(100, 160))
    memory.make(keys, at=[10, 18])
    memory.make(others)
    assert memory.manager.match([*keys[:30], 99]) == 20, "the mark keeps the blocks that it needs"
    assert memory.make([*keys[:30], 99]) == 11
    memory.manager.check()
    assert memory.manager.match([*keys[:30], 99]) == 31


def on_device(memory: Memory, keys: list[int]) -> int:
    """How many rows of a path the device alone can resume."""
    path, _, rows = memory.manager.index.find(keys)
    return len(path) * SIZE + rows


def test_a_mark_that_was_given_up_for_its_slot_comes_back_from_host_memory() -> None:
    memory = Memory(200, 30, 3, host=[300])
    first, second = list(range(100)), list(range(200, 300))
    memory.make(first, at=[50])
    memory.make(second, at=[10, 20, 30])
    assert on_device(memory, first) == 0, (
        "its marks are given up, and the log does not reach back to its first row"
    )
    assert memory.manager.match(first) == 100
    assert memory.make([*first, 99]) == 1
    assert memory.replayed == 0
    assert memory.manager.tier.restored_rows == 100
    assert memory.make([*first[:70], 99]) == 21, "from a copy, at its very row"


def test_a_mark_comes_back_with_its_blocks_and_its_log() -> None:
    memory = Memory(11, 30, 8, host=[300])
    first, second = list(range(42)), list(range(100, 142))
    memory.make(first, at=[18])
    memory.make(second)
    assert memory.manager.index.chain(first) == []
    assert memory.make([*first, 99]) == 1
    assert memory.manager.tier.restored_rows == 42
    assert memory.manager.match([*first[:18], 99]) == 18
    memory.manager.evict_all()
    assert memory.manager.match(first) == 0


def test_a_mark_is_copied_before_its_rows_in_the_log_are_lost() -> None:
    memory = Memory(200, 20, 30, host=[300])
    paths = [[first, *range(7)] for first in range(20)]
    for path in paths:
        memory.make(path)
    assert (len(memory.marks), on_device(memory, paths[0])) == (20, 0)
    assert memory.make([*paths[0], 99]) == 1


def test_forgetting_a_path_forgets_its_states_in_host_memory() -> None:
    memory = Memory(12, 30, 8, host=[300])
    first, second = list(range(42)), list(range(100, 142))
    memory.make(first, at=[18])
    memory.make(second)
    memory.manager.forget(first, 0)
    assert memory.manager.match(first) == 0
    memory.manager.forget(second, 0)
    assert (len(memory.manager.tier), memory.manager.num_cached) == (0, 0)


def test_rows_that_are_computed_again_become_the_known_blocks() -> None:
    memory = Memory(64, 20, 2)
    keys = list(range(40))
    memory.make(keys)
    memory.make(list(range(100, 180)))
    before = memory.manager.num_free
    assert memory.manager.match([*keys, 41]) == 40
    memory.manager.evict_all()
    assert memory.manager.num_free > before


def test_an_evicted_block_takes_its_marks_along() -> None:
    memory = Memory(64, 60, 8)
    memory.make(list(range(40)), at=[3, 8, 10])
    assert sorted(mark.row for mark in memory.marks) == [3, 8, 10, 40]
    memory.manager.forget(list(range(40)), 9)
    assert sorted(mark.row for mark in memory.marks) == [3, 8]
    memory.manager.evict_all()
    assert not [*memory.marks]
    memory.manager.check()


def test_marks_of_the_conversation_in_use_get_thinner_towards_its_beginning() -> None:
    memory = Memory(200, 150, 6)
    keys = list(range(240))
    memory.manager.pin(keys)
    memory.make(keys, at=list(range(10, 240, 10)))
    rows = sorted(mark.row for mark in memory.marks)
    gaps = [after - row for row, after in pairwise(rows)]
    assert len(rows) >= 4
    assert gaps[-1] <= gaps[0]
    assert rows[-1] == 240


def test_marks_of_other_paths_go_first_and_idle_work_takes_none_of_the_conversation_in_use() -> None:
    memory = Memory(200, 150, 4)
    talk, other = list(range(20)), list(range(100, 120))
    memory.manager.pin(talk)
    memory.make(talk, at=[10])
    memory.make(other, at=[10])
    memory.make(list(range(200, 220)), at=[10])
    assert {mark.row for mark in memory.marks if mark.degree} == {10, 20}
    table = memory.manager.open([*talk, 1], idle=True)
    other_table = memory.manager.open([300], idle=True)
    memory.grow(table, [*talk, 1], 1, idle=True)
    memory.grow(other_table, [300], 1, idle=True)
    with pytest.raises(OutOfBlocksError):
        memory.grow(memory.manager.open([400], idle=True), [400], 1, idle=True)
    memory.manager.check()
    assert memory.manager.match(talk) == 20


def test_the_brief_marks_of_an_answer_follow_its_end() -> None:
    memory = Memory(200, 150, 9)
    keys = list(range(90))
    table = memory.manager.open(keys)
    while table.length < len(keys):
        memory.grow(table, keys, 1, at=[table.length + 1] if table.length % 8 == 7 else [], is_brief=True)
    assert sorted(mark.row for mark in memory.marks) == [80, 88]
    memory.manager.close(table)
    assert memory.manager.match([*keys[:83], 1]) == 83
    memory.manager.check()


def test_a_state_that_a_failed_step_may_have_spoilt_is_not_used_again() -> None:
    memory = Memory(64, 60, 4)
    keys = list(range(20))
    table = memory.manager.open(keys)
    memory.grow(table, keys, 6)
    memory.manager.reserve(table, 6)
    memory.manager.states.plan(table, StatePlan(6))
    memory.manager.close(table)
    assert not [*memory.marks]
    assert memory.manager.match(keys) == 6, "the log begins with the path"


def test_a_person_takes_the_states_of_idle_work() -> None:
    memory = Memory(64, 60, 1)
    scheduler = Scheduler(memory.manager, max_chunk=8, idle_chunk=8)
    idle = Asked(Rows.of(list(range(40))), Priority.IDLE)
    scheduler.add(idle)
    scheduler.done(scheduler.next_step())
    assert idle.computed == 8
    person = Asked(Rows.of(list(range(100, 120))), Priority.PERSON)
    scheduler.add(person)
    step = scheduler.next_step()
    assert [chunk.sequence for chunk in step.chunks] == [person]
    assert idle.status is SequenceStatus.PREEMPTED
    scheduler.done(step)
    memory.manager.check()
