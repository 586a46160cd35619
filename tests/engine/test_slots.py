"""The block tables of slots on the device are those of the blocks, in every group of layers, whatever happens."""

from random import Random

import pytest
import torch

from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.group_pool import GroupPool
from engine.cache.window import Window
from engine.execute.cuda.slots import Slots
from tests.fresh import seeds

SIZE, SLOTS, ROWS = 7, 3, 110


class Streams:
    """Sequences in slots that begin alike and become alike, some rows at a time."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.pools = [GroupPool(24, Window(17, 6)), GroupPool(18, Window(2, 6))]
        self.blocks = BlockManager(60, SIZE, pools=self.pools)
        self.slots = Slots(
            SLOTS, SLOTS, -(-ROWS // SIZE) + 2, torch.zeros(SLOTS, dtype=torch.int64), self.pools
        )
        self.seats: dict[int, tuple[BlockTable, list[int]]] = {}

    def join(self, slot: int) -> None:
        keys = [self.rng.randrange(2)] * ROWS
        for _ in range(self.rng.randrange(3)):
            keys[self.rng.randrange(ROWS)] = 2
        self.seats[slot] = self.blocks.open(keys[: self.rng.randrange(ROWS - 10)]), keys
        self.slots.put(slot, 0, 0)

    def go_on(self, slot: int) -> None:
        """As in a step that checks guesses: room for fewer rows than a block has, of which one or more are kept."""
        table, keys = self.seats[slot]
        new = keys[table.length : table.length + self.rng.randint(1, 6)]
        try:
            self.blocks.reserve(table, len(new))
        except OutOfBlocksError:
            return
        self.show()
        self.blocks.commit(table, new[: self.rng.randint(1, len(new))])
        self.blocks.trim(table)

    def leave(self, slot: int) -> None:
        self.blocks.close(self.seats.pop(slot)[0])

    def show(self) -> None:
        for slot, (table, _) in self.seats.items():
            self.slots.show(slot, table.blocks, table.first, table.firsts)
        self.slots.send()
        primary, *others = self.slots.given.tables
        for slot, (table, _) in self.seats.items():
            count = len(table.blocks)
            assert primary[slot, :count].tolist() == table.blocks
            for given, pool, first in zip(others, self.pools, table.firsts, strict=True):
                held = [pool.slot(block) for block in table.blocks[first:]]
                assert given[slot, :count].tolist() == [pool.blank] * first + held
                assert pool.blank not in held


@pytest.mark.parametrize("seed", seeds(20))
def test_any_program(seed: int) -> None:
    streams = Streams(Random(seed))
    for _ in range(200):
        slot = streams.rng.randrange(SLOTS)
        if slot not in streams.seats:
            streams.join(slot)
        elif streams.rng.random() < 0.1 or streams.seats[slot][0].length > ROWS - 7:
            streams.leave(slot)
        else:
            streams.go_on(slot)
        streams.show()
        streams.blocks.check()
