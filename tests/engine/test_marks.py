"""BlockManager with marks: a table goes on from a state and a log that its own path left, whatever was given up."""

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest

from engine.batch import NONE
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.copies import Copy, RowCopy
from engine.cache.group_pool import GroupPool
from engine.cache.live_state import StatePlan
from engine.cache.marks import LOG_ROWS, Marks
from engine.cache.rows import Rows
from engine.cache.window import Window
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Priority, SequenceStatus
from engine.schedule.sequence import Sequence as Asked

SIZE, STEP = 4, 6


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
    ) -> None:
        self.size, self.tail = size, tail
        self.pool = GroupPool(log, Window(LOG_ROWS + tail, STEP))
        self.marks = Marks(states, tail, self.pool, size)
        self.log: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {NONE: ()}
        self.manager = BlockManager(blocks, size, self.copy, pools=[*others, self.pool], marks=self.marks)
        self.replayed = 0

    def copy(self, copy: Copy) -> None:
        assert isinstance(copy, RowCopy)
        for memory, (source, target) in (
            (self.rows, (copy.source, copy.target)),
            (self.log, (self.pool.slot(copy.source), self.pool.slot(copy.target))),
        ):
            for row in range(copy.rows):
                memory[target * self.size + row] = memory[source * self.size + row]

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


@pytest.mark.parametrize("seed", range(80))
def test_a_table_goes_on_from_the_state_of_its_own_path(seed: int) -> None:
    choose = random.Random(seed)
    size, tail = choose.choice([(2, 3), (4, 3), (4, 1), (4, 6)])
    log = choose.randint(3 * Window(LOG_ROWS + tail, STEP).most_blocks(size) // 2, 90)
    window = Window(choose.randint(1, 9), STEP)
    others = [GroupPool(choose.randint(3 * window.most_blocks(size), 40), window)] if seed % 3 == 0 else []
    memory = Memory(choose.randint(24, 60), log, choose.randint(3, 9), tail, size, others)
    manager = memory.manager
    tables: list[tuple[BlockTable, list[int]]] = []
    known: list[list[int]] = [[]]
    for _ in range(300):
        match choose.choice(
            ["open", "grow", "grow", "guess", "close", "fail", "restore", "pin", "keep", "forget", "evict"]
        ):
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
                with suppress(OutOfBlocksError):
                    idle = choose.random() < 0.3
                    memory.grow(table, keys, choose.randint(1, STEP), at, idle, 0, choose.random() < 0.5)
            case "guess" if tables:
                table, keys = choose.choice(tables)
                with suppress(OutOfBlocksError):
                    memory.grow(table, keys, 1, guesses=choose.randint(0, 3))
            case "fail" if tables:
                table, keys = tables.pop(choose.randrange(len(tables)))
                with suppress(OutOfBlocksError):
                    manager.reserve(table, 1)
                    manager.states.plan(table, StatePlan(1, (table.length + 1,)))
                    assert table.state is not None
                    for _, slot in table.state.moves.saves:
                        memory.states[slot] = (-1,)
                manager.close(table)
            case "close" if tables:
                table, _ = tables.pop(choose.randrange(len(tables)))
                manager.close(table)
            case "restore" if not others and known[1:]:
                keys = choose.choice(known[1:])
                with suppress(OutOfBlocksError, OSError):
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
