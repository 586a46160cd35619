"""BlockManager with groups: each group's slots hold the rows that a table needs, whatever was taken back."""

import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.copies import Copy, Offload, RowCopy
from engine.cache.group_pool import GroupPool
from engine.cache.offload import HostTier
from engine.cache.window import Window
from tests.fresh import seeds

SIZE = 2
TORN = (-1,)


class CopyError(Exception):
    pass


class Memory:
    """What each slot of each group holds: of every row, the whole path that led to it."""

    def __init__(
        self,
        blocks: int,
        groups: list[GroupPool],
        window: Window | None = None,
        host: Sequence[int] | None = None,
    ) -> None:
        """`host` are the sizes of the pieces of host memory, if there is any."""
        self.groups = groups
        self.rows: list[dict[int, tuple[int, ...]]] = [{} for _ in range(len(groups) + 1)]
        self.window = window
        self.host: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {}
        self.fails_in = -1
        """So many copies from now on the one comes that fails; -1: none."""
        left = [*(host or ())]
        tier = None
        if host is not None:
            tier = HostTier(lambda: left.pop(0) if left else 0, lambda group, row: 1 + group)
        self.manager = BlockManager(blocks, SIZE, self.copy, tier, window, groups)

    def at(self, block: int) -> list[int]:
        return [block, *(pool.slot(block) for pool in self.groups)]

    def copy(self, copy: Copy) -> None:
        """Carry it out, or fail and leave the target in pieces."""
        fails, self.fails_in = self.fails_in == 0, max(self.fails_in - 1, -1)
        if isinstance(copy, RowCopy):
            pairs = zip(self.at(copy.source), self.at(copy.target), strict=True)
            for group, (source, target) in enumerate(pairs):
                for row in range(copy.rows):
                    found = self.rows[group][source * SIZE + row]
                    self.rows[group][target * SIZE + row] = TORN if fails else found
        else:
            rows, at = self.rows[copy.group], self.at(copy.block)[copy.group]
            places = range(at * SIZE, (at + 1) * SIZE)
            if isinstance(copy, Offload):
                for held in [held for held in self.host if {*held} & {*copy.slots}]:
                    del self.host[held]
                self.host[copy.slots] = [TORN if fails else rows.get(row) for row in places]
            else:
                for row, found in zip(places, self.host[copy.slots], strict=True):
                    rows[row] = TORN if fails or found is None else found
        if fails:
            raise CopyError

    def grow(self, table: BlockTable, keys: list[int], count: int, is_bare: bool = False) -> None:
        new = keys[table.length : table.length + count]
        self.manager.reserve(table, len(new), is_bare=is_bare)
        for row in range(table.length, table.length + len(new)):
            for group, slot in enumerate(self.at(table.blocks[row // SIZE])[: 1 if is_bare else None]):
                self.rows[group][slot * SIZE + row % SIZE] = tuple(keys[: row + 1])
        self.manager.commit(table, new)

    def check(self, table: BlockTable, keys: list[int]) -> None:
        for group, window in enumerate([self.window, *(pool.window for pool in self.groups)]):
            seen = 0 if window is None else max(table.length - window.rows + 1, 0)
            for row in range(seen, table.length):
                slot = self.at(table.blocks[row // SIZE])[group]
                assert self.rows[group][slot * SIZE + row % SIZE] == tuple(keys[: row + 1])


@pytest.mark.parametrize("seed", [*seeds(90), 1170011360])
@pytest.mark.parametrize("has_host", [False, True])
def test_a_table_reads_in_every_group_what_was_written_on_its_path(seed: int, has_host: bool) -> None:
    choose = random.Random(seed)
    step = 3
    groups = []
    for _ in range(choose.randint(0, 3)):
        window = Window(choose.randint(1, 7), step)
        groups.append(GroupPool(choose.randint(window.most_blocks(SIZE), 14), window))
    widest = Window(choose.randint(8, 10), step) if seed % 3 == 0 else None
    host = [choose.randint(1, 12) for _ in range(choose.randint(1, 6))] if has_host else None
    memory = Memory(choose.randint(12, 24), groups, widest, host)
    tables: list[tuple[BlockTable, list[int]]] = []
    known: list[list[int]] = [[]]
    operations = ["open", "grow", "grow", "close", "restore", "pin", "keep", "forget", "fault"]
    for _ in range(400):
        with suppress(OutOfBlocksError, CopyError):
            match choose.choice(operations):
                case "open" if len(tables) < 3:
                    begin = choose.choice(known)
                    keys = begin[: choose.randint(0, len(begin))]
                    keys = keys + [choose.randrange(2) for _ in range(choose.randint(1, 10))]
                    keys = keys[:20]
                    present = memory.manager.match(keys)
                    others = [(one, len(given)) for one, given in tables]
                    memory.manager.fits_beside(keys, len(keys), others)
                    table = memory.manager.open(keys, idle=choose.random() < 0.2)
                    assert table.length <= present
                    memory.check(table, keys)
                    tables.append((table, keys))
                    known.append(keys)
                case "grow" if tables:
                    table, keys = choose.choice(tables)
                    memory.grow(table, keys, choose.randint(1, step))
                case "close" if tables:
                    table, keys = tables.pop(choose.randrange(len(tables)))
                    length = table.length
                    memory.manager.close(table)
                    assert memory.manager.match(keys[:length]) == length, "closing loses nothing"
                case "restore":
                    restore(memory, choose, choose.choice(known), step)
                case "pin":
                    memory.manager.pin(choose.choice(known))
                case "keep":
                    memory.manager.keep("a", choose.choice([None, *known]))
                case "forget":
                    keys = choose.choice(known)
                    memory.manager.forget(keys, choose.randint(0, len(keys)))
                case "fault" if has_host:
                    memory.fails_in = choose.randint(0, 4)
        memory.manager.check()
        for table, keys in tables:
            memory.check(table, keys)


def restore(memory: Memory, choose: random.Random, keys: list[int], step: int) -> None:
    """Make a path present as from a file, which has rows of groups only at its end."""
    manager = memory.manager
    bare = min(manager.groups.firsts(len(keys) // SIZE), default=0) * SIZE
    bare = choose.choice([bare, bare // 2 // SIZE * SIZE])
    whole = manager.match(keys) // SIZE * SIZE
    if memory.window is None and whole < bare:
        table = manager.open(keys[:whole])
        if table.length == whole:
            manager.go_along(table, keys[:bare])
    else:
        table = manager.open(keys)
    try:
        if table.length < bare:
            memory.grow(table, keys, bare - table.length, is_bare=True)
        while table.length < len(keys):
            manager.check()
            memory.grow(table, keys, choose.randint(1, step))
        memory.check(table, keys)
    finally:
        manager.close(table)


def test_a_retry_further_back_than_the_window_resumes_at_the_last_row_that_is_whole() -> None:
    pool = GroupPool(4, Window(3, 2))
    memory = Memory(16, [pool])
    keys = list(range(20))
    table = memory.manager.open(keys)
    while table.length < len(keys):
        memory.grow(table, keys, 2)
    memory.manager.close(table)
    assert memory.manager.match(keys) == 20
    assert memory.manager.match([*keys[:19], 99]) == 19
    assert memory.manager.match([*keys[:8], 99]) == 0
    memory.manager.check()


def test_a_table_needs_room_in_every_group() -> None:
    pool = GroupPool(5, Window(3, 2))
    memory = Memory(64, [pool])
    keys = list(range(20))
    table = memory.manager.open(keys)
    memory.grow(table, keys, 4)
    assert memory.manager.fits_beside(keys, 4, [(table, 4)])
    assert not memory.manager.fits_beside([9], 20, [(table, 20)])
    other = memory.manager.open([9])
    with pytest.raises(OutOfBlocksError):
        memory.manager.reserve(other, 10)
    memory.manager.check()


def test_forgetting_a_path_frees_blocks_that_have_lost_their_slots() -> None:
    pool = GroupPool(4, Window(3, 2))
    memory = Memory(16, [pool])
    keys, others = list(range(7)), [20, 21, 22, 23, 24, 25, 26, 27]
    for path in (keys, others):
        table = memory.manager.open(path)
        while table.length < len(path):
            memory.grow(table, path, 2)
        memory.manager.close(table)
    assert memory.manager.match(keys) == 0
    assert memory.manager.forget(keys, 0) == 4
    memory.manager.check()


def made(memory: Memory, keys: list[int]) -> int:
    """Make a path present. Return how many rows were computed for it."""
    table = memory.manager.open(keys)
    computed = len(keys) - table.length
    while table.length < len(keys):
        memory.grow(table, keys, 2)
    memory.check(table, keys)
    memory.manager.close(table)
    memory.manager.check()
    return computed


def test_a_path_that_lost_its_slots_is_resumed_with_what_host_memory_has_of_its_end() -> None:
    memory = Memory(64, [GroupPool(4, Window(5, 2))], host=[20])
    first, second = list(range(20)), list(range(100, 120))
    assert (made(memory, first), made(memory, second)) == (20, 20)
    assert not any(block.id in memory.groups[0] for block in memory.manager.index.chain(first))
    assert len(memory.manager.tier) == 2, "only what its window sees was copied"
    assert memory.manager.match(first) == 20
    assert made(memory, [*first, 50]) == 1
    assert memory.manager.tier.restored_rows == 4
    assert memory.manager.match([*first[:8], 99]) == 0, "nothing ended there"
    assert memory.manager.match([*first[:17], 99]) == 0, "nor there"


def test_a_path_that_was_evicted_comes_back_with_the_rows_that_its_end_needs() -> None:
    memory = Memory(11, [GroupPool(4, Window(3, 2)), GroupPool(7, Window(7, 2))], host=[100])
    first, second = list(range(21)), list(range(100, 121))
    assert (made(memory, first), made(memory, second)) == (21, 21)
    assert memory.manager.index.chain(first) == []
    slots = [slots for block in memory.manager.tier._by_age for slots in block.slots]
    assert [slots.count(group) for group in range(3)] == [11, 2, 4]
    assert memory.manager.match(first) == 21
    assert made(memory, [*first, 50]) == 1
    assert memory.manager.match(second) == 21
    assert made(memory, second) == 0


def test_without_room_for_its_slots_a_path_is_not_resumed_there() -> None:
    memory = Memory(64, [GroupPool(5, Window(5, 2))], host=[100])
    first, second = list(range(20)), list(range(100, 120))
    made(memory, first)
    table = memory.manager.open(second)
    while table.length < len(second):
        memory.grow(table, second, 2)
    memory.manager.reserve(table, 4)
    assert memory.manager.match(first) == 20
    assert memory.manager.open(first).length == 0, "the other one holds slots that it needs"
    memory.manager.check()


def test_host_memory_is_prepared_before_the_first_slots_are_lost() -> None:
    memory = Memory(64, [GroupPool(5, Window(5, 2))], host=[100])
    table, keys = memory.manager.open([]), list(range(20))
    filling = []
    while table.length < len(keys):
        filling.append(memory.manager.is_filling)
        memory.grow(table, keys, 2)
    assert filling[:5] == [False, False, False, False, True]
    assert memory.manager.num_free > 50
