"""BlockManager with groups: each group's slots hold the rows that a table needs, whatever was taken back."""

import random
from contextlib import suppress

import pytest

from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.copies import Copy, RowCopy
from engine.cache.group_pool import GroupPool
from engine.cache.offload import HostTier
from engine.cache.window import Window

SIZE = 2


class Memory:
    """What each slot of each group holds: of every row, the whole path that led to it."""

    def __init__(self, blocks: int, groups: list[GroupPool], window: Window | None = None) -> None:
        self.groups = groups
        self.rows: list[dict[int, tuple[int, ...]]] = [{} for _ in range(len(groups) + 1)]
        self.window = window
        self.manager = BlockManager(blocks, SIZE, self.copy, window=window, pools=groups)

    def at(self, block: int) -> list[int]:
        return [block, *(pool.slot(block) for pool in self.groups)]

    def copy(self, copy: Copy) -> None:
        assert isinstance(copy, RowCopy)
        for group, (source, target) in enumerate(
            zip(self.at(copy.source), self.at(copy.target), strict=True)
        ):
            for row in range(copy.rows):
                self.rows[group][target * SIZE + row] = self.rows[group][source * SIZE + row]

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


@pytest.mark.parametrize("seed", range(60))
def test_a_table_reads_in_every_group_what_was_written_on_its_path(seed: int) -> None:
    choose = random.Random(seed)
    step = 3
    groups = []
    for _ in range(choose.randint(0, 3)):
        window = Window(choose.randint(1, 7), step)
        groups.append(GroupPool(choose.randint(window.most_blocks(SIZE), 14), window))
    widest = Window(choose.randint(8, 10), step) if seed % 3 == 0 else None
    memory = Memory(choose.randint(12, 24), groups, widest)
    tables: list[tuple[BlockTable, list[int]]] = []
    known: list[list[int]] = [[]]
    for _ in range(400):
        match choose.choice(["open", "grow", "grow", "close", "restore", "pin", "keep", "forget"]):
            case "open" if len(tables) < 3:
                begin = choose.choice(known)
                keys = begin[: choose.randint(0, len(begin))]
                keys = keys + [choose.randrange(2) for _ in range(choose.randint(1, 10))]
                keys = keys[:20]
                present = memory.manager.match(keys)
                memory.manager.fits_beside(keys, len(keys), [(one, len(given)) for one, given in tables])
                table = memory.manager.open(keys, idle=choose.random() < 0.2)
                assert table.length <= present
                memory.check(table, keys)
                tables.append((table, keys))
                known.append(keys)
            case "grow" if tables:
                table, keys = choose.choice(tables)
                with suppress(OutOfBlocksError):
                    memory.grow(table, keys, choose.randint(1, step))
            case "close" if tables:
                table, _ = tables.pop(choose.randrange(len(tables)))
                memory.manager.close(table)
            case "restore":
                keys = choose.choice(known)
                bare = min(memory.manager.groups.firsts(len(keys) // SIZE), default=0) * SIZE
                bare = choose.choice([bare, bare // 2 // SIZE * SIZE])
                whole = memory.manager.match(keys) // SIZE * SIZE
                if widest is None and whole < bare:
                    table = memory.manager.open(keys[:whole])
                    memory.manager.go_along(table, keys[:bare])
                else:
                    table = memory.manager.open(keys)
                with suppress(OutOfBlocksError):
                    if table.length < bare:
                        memory.grow(table, keys, bare - table.length, is_bare=True)
                    while table.length < len(keys):
                        memory.manager.check()
                        memory.grow(table, keys, choose.randint(1, step))
                    memory.check(table, keys)
                memory.manager.close(table)
            case "pin":
                memory.manager.pin(choose.choice(known))
            case "keep":
                memory.manager.keep("a", choose.choice([None, *known]))
            case "forget":
                keys = choose.choice(known)
                memory.manager.forget(keys, choose.randint(0, len(keys)))
        memory.manager.check()
        for table, keys in tables:
            memory.check(table, keys)


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


def test_blocks_with_groups_take_no_host_memory() -> None:
    with pytest.raises(ValueError, match="several groups"):
        BlockManager(4, SIZE, tier=HostTier(), pools=[GroupPool(4, Window(3, 2))])
