"""The tier in host memory: what was evicted comes back, and is what it was."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from hypothesis import settings

from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.copies import Copy, Offload, Restore, RowCopy
from engine.cache.host_memory import HostKV, PromptCosts
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import KVRow
from engine.cache.offload import HostTier
from engine.cache.sizing import offload_bytes
from tests.counting import PATIENCE
from tests.engine.test_blocks import Blocks
from tests.engine.test_chat import CONFIG, ask
from tests.engine.test_eviction import others
from tests.engine.tiny import TinyEngine, close_to, tiny_engine
from tests.fresh import examples


def pieces(*sizes: int) -> HostTier:
    """A tier that grows by these."""
    left = list(sizes)
    return HostTier(lambda: left.pop(0) if left else 0)


def manager_of(blocks: int, size: int, *slots: int) -> tuple[BlockManager, list[Copy]]:
    """A manager with a tier that grows by `slots`, and what it has copied."""
    copies: list[Copy] = []
    return BlockManager(blocks, size, copies.append, pieces(*slots)), copies


def fill(manager: BlockManager, keys: list) -> BlockTable:
    """An open table with these keys."""
    table = manager.open(keys)
    rest = keys[table.length :]
    manager.reserve(table, len(rest))
    manager.commit(table, rest)
    manager.check()
    return table


def used(manager: BlockManager, keys: list) -> None:
    """The same, closed again."""
    manager.close(fill(manager, keys))
    manager.check()


TALK, OTHER = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]


def test_what_is_evicted_is_offloaded_from_its_end_and_comes_back_from_its_beginning() -> None:
    manager, copies = manager_of(3, 2, 8)
    used(manager, TALK)
    assert copies == []
    used(manager, OTHER)
    assert copies == [Offload(2, (0,)), Offload(1, (1,)), Offload(0, (2,))]
    assert manager.match(TALK) == 6
    copies.clear()
    table = manager.open(TALK)
    assert table.length == 6
    assert [copy for copy in copies if isinstance(copy, Restore)] == [
        Restore((slot,), block) for slot, block in zip((2, 1, 0), table.blocks, strict=True)
    ]
    assert manager.tier.restored_rows == 6
    for block in table.blocks:  # each was copied before something was written over it
        offload = next(copy for copy in copies if isinstance(copy, Offload) and copy.block == block)
        assert copies.index(offload) < next(
            i for i, copy in enumerate(copies) if isinstance(copy, Restore) and copy.block == block
        )
    manager.check()


def test_a_block_that_came_back_is_not_copied_again_when_it_is_evicted() -> None:
    manager, copies = manager_of(3, 2, 8)
    used(manager, TALK)
    used(manager, OTHER)
    used(manager, TALK)
    copies.clear()
    used(manager, OTHER)
    assert all(isinstance(copy, Restore) for copy in copies)
    assert len(copies) == 3


def test_the_rows_of_an_unfinished_block_and_the_beginning_of_another_branch_come_back_too() -> None:
    manager = BlockManager(4, 4, tier=pieces(8))
    used(manager, [1, 2, 3, 4, 5, (6, (9, 9))])
    used(manager, list(range(20, 36)))
    assert manager.match([1, 2, 3, 4, 5, (6, (9, 9)), 7]) == 6
    assert manager.match([1, 2, 3, 4, 5, 6, 7]) == 5, "a key with a mark is another key"
    assert manager.match([1, 2, 9]) == 2
    assert fill(manager, [1, 2, 3, 4, 5, (6, (9, 9)), 7, 8, 9]).length == 9
    assert manager.tier.restored_rows == 6


def test_equal_rows_after_different_beginnings_are_different_blocks() -> None:
    manager, copies = manager_of(2, 2, 8)
    for start in (1, 2):
        used(manager, [start, start, 7, 7])
    used(manager, [3, 3, 4, 4])
    for start, rows in ((1, 4), (2, 4), (3, 4), (4, 0)):
        assert manager.match([start, start, 7, 7]) == (2 if start == 3 else rows)
    slots = {}
    for start in (1, 2):
        copies.clear()
        used(manager, [start, start, 7, 7])
        slots[start] = [copy.slots[0] for copy in copies if isinstance(copy, Restore)]
    assert not set(slots[1]) & set(slots[2])


def test_where_slots_run_out_the_oldest_block_goes_and_a_path_keeps_its_beginning() -> None:
    manager = BlockManager(3, 2, tier=pieces(1, 1))
    used(manager, TALK)
    used(manager, OTHER)
    assert len(manager.tier) == 2
    assert manager.match(TALK) == 4


def test_of_a_path_that_came_back_the_beginning_stays_longest() -> None:
    tier = pieces(4)
    names = [tier.name(0, (1, 2))]
    names += [tier.name(names[0], (3, 4))]
    slots: list[tuple[int, ...]] = []
    for name, parent, keys in ((names[0], 0, (1, 2)), (names[1], names[0], (3, 4)), (0, names[1], (5,))):
        tier.put(name, parent, keys, slots.append)
    assert slots == [(0,), (1,), (2,)]
    tier.touch([block for block, _ in tier.follow(0, [1, 2, 3, 4, 5, 6], 2)])
    left = []
    for key in (7, 8, 9, 10):
        tier.put(0, 0, (key,), slots.append)
        left.append([rows for _, rows in tier.follow(0, [1, 2, 3, 4, 5, 6], 2)])
        tier.check([])
    assert left == [[2, 2, 1], [2, 2], [2], []]


def test_a_block_with_more_rows_takes_the_place_of_what_it_was() -> None:
    manager = BlockManager(2, 4, tier=pieces(8))
    used(manager, [1, 2, 3, 4, 5])
    used(manager, [9] * 8)
    used(manager, [1, 2, 3, 4, 5, 6])
    used(manager, [9] * 8)
    assert manager.match([1, 2, 3, 4, 5, 6]) == 6
    assert len(manager.tier) == 4


def test_coming_back_takes_no_more_than_there_is_room_for() -> None:
    manager = BlockManager(4, 2, tier=pieces(1, 8))
    used(manager, TALK)
    held = fill(manager, OTHER)
    table = manager.open(TALK)
    assert table.length == 2, "three blocks are held"
    manager.check()
    with pytest.raises(OutOfBlocksError):
        manager.reserve(table, 2)
    manager.close(held)
    manager.pin(OTHER)
    assert manager.open(TALK, idle=True).length == 2, "nor does idle work take the conversation in use"
    assert manager.open(TALK).length == 6
    manager.check()


def test_a_tier_of_one_slot_may_lose_what_should_come_back_to_what_makes_room_for_it() -> None:
    manager, copies = manager_of(1, 2, 1)
    used(manager, [1, 2])
    used(manager, [3, 4])
    copies.clear()
    table = manager.open([1, 2])
    assert (table.length, table.blocks) == (0, [])
    assert copies == [Offload(0, (0,))]
    manager.check()


def test_what_makes_room_for_it_may_be_the_block_that_matches_less_of_it() -> None:
    manager, copies = manager_of(1, 4, 1)
    used(manager, [1, 2, 3, 4])
    used(manager, [1, 2, 9, 9])
    copies.clear()
    table = manager.open([1, 2, 3, 4])
    assert (table.length, table.blocks) == (0, [])
    assert copies == [Offload(0, (0,))], (
        "the other block left the device, and its slot was that of the wanted one"
    )
    manager.check()


def test_what_is_forgotten_is_forgotten_there_too_but_not_what_others_need() -> None:
    manager = BlockManager(3, 2, tier=pieces(8))
    used(manager, TALK)
    used(manager, [1, 2, 3, 4, 9, 9])
    used(manager, OTHER)
    assert manager.forget(TALK, 2) == 0
    assert (manager.match(TALK), manager.match([1, 2, 3, 4, 9, 9])) == (4, 6)
    manager.check()
    manager.forget([1, 2, 3, 4, 9, 8], 0)
    assert manager.match([1, 2, 3, 4, 9, 9]) == 6, "only its beginning is that of the other path"
    manager.forget([1, 2, 3, 4, 9, 9], 2)
    assert manager.match([1, 2, 3, 4, 9, 9]) == 2
    manager.check()
    manager.evict_all()
    assert (manager.match(TALK), len(manager.tier)) == (0, 0)
    manager.check()


class OffloadedBlocks(Blocks):
    """The same random use, with a tier that is too small for what is evicted."""

    def tier(self) -> HostTier:
        return pieces(2, 3, 4)

    def teardown(self) -> None:
        for block in self.manager.tier._by_age:
            rows = self.host[block.slots[0]][: len(block.keys)]
            assert [row[-1] for row in rows] == list(block.keys), "a slot has what was offloaded to it"


OffloadedBlocks.TestCase.settings = settings(examples(120), stateful_step_count=40)
TestOffloadedBlocks = OffloadedBlocks.TestCase


def test_copies_are_carried_out_in_their_order_and_memory_is_taken_when_it_is_needed() -> None:
    cache = KVCache.uniform(2, 4, 4, 1, 2, torch.float32, torch.device("cpu"))
    cache.kv.copy_(torch.arange(cache.kv.numel()).view_as(cache.kv))
    before = cache.kv.clone()
    cache.host = host = HostKV(cache.block, 4, most_bytes=3 * cache.kv[:, :, :4].nbytes + 1)
    assert host.nbytes == 0
    assert (host.grow(), host.grow(), host.nbytes) == (3, 0, 3 * host.block_bytes)
    for copy in (
        Offload(1, (2,)),
        RowCopy(0, 1, 4),
        Offload(1, (0,)),
        RowCopy(3, 0, 2),
        Restore((0,), 3),
        Restore((2,), 2),
    ):
        cache.carry_out(copy)
    block = [slice(4 * i, 4 * i + 4) for i in range(4)]
    assert torch.equal(cache.kv[:, :, block[1]], before[:, :, block[0]])
    assert torch.equal(cache.kv[:, :, block[3]], before[:, :, block[0]])
    assert torch.equal(cache.kv[:, :, block[2]], before[:, :, block[1]])
    assert torch.equal(cache.kv[:, :, :2], before[:, :, 12:14])
    host.close()
    assert (host.nbytes, host.grow()) == (0, 0)


def test_blocks_of_layers_with_other_rows_are_copied_whole() -> None:
    rows = [KVRow(1, 2, torch.float32), KVRow(2, 4, torch.float32), KVRow(1, 2, torch.float32)]
    cache = KVCache(rows, 4, 4, torch.float32, torch.device("cpu"))
    for part in cache.parts:
        part.copy_(torch.arange(part.numel()).view_as(part))
    before = [[rows.clone() for rows in cache.block(block)] for block in range(4)]
    cache.host = host = HostKV(cache.block, 4, most_bytes=10**6)
    host.grow()
    for copy in (Offload(1, (0,)), RowCopy(0, 1, 3), Restore((0,), 2)):
        cache.carry_out(copy)
    for part in range(2):
        assert torch.equal(cache.block(2)[part], before[1][part])
        assert torch.equal(cache.block(1)[part][:, :, :3], before[0][part][:, :, :3])
        assert torch.equal(cache.block(1)[part][:, :, 3:], before[1][part][:, :, 3:])
    host.close()


def test_memory_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache.uniform(1, 8, 4, 1, 2, torch.float32, torch.device("cpu"))
    block_bytes = cache.kv[:, :, :4].nbytes
    monkeypatch.setattr("engine.cache.host_memory.PIECE_BYTES", 3 * block_bytes + 1)
    cache.host = host = HostKV(cache.block, 4, most_bytes=8 * block_bytes)
    tier = HostTier(host.grow)
    cache.kv.copy_(torch.arange(8).repeat_interleave(4).view(1, 1, 32, 1, 1).expand_as(cache.kv))
    for block in range(8):
        tier.put(0, 0, (block,), lambda slots, block=block: cache.carry_out(Offload(block, slots)))
    assert host.nbytes == 8 * block_bytes
    cache.kv.zero_()
    for slot in range(8):
        cache.carry_out(Restore((slot,), 7 - slot))
    assert cache.k[0][::4, 0, 0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_memory_is_pinned_ahead_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a GPU: a thread pins pieces, and as long as none is ready there are no slots."""
    cache = KVCache.uniform(1, 8, 4, 1, 2, torch.float32, torch.device("cpu"))
    block_bytes = cache.kv[:, :, :4].nbytes
    go_on = Event()
    pinned: list[int] = []

    def pin(piece: torch.Tensor) -> bool:
        assert go_on.wait(PATIENCE)
        pinned.append(len(piece))
        return len(pinned) < 5

    monkeypatch.setattr("engine.cache.host_memory.PIECE_BYTES", 2 * block_bytes)
    monkeypatch.setattr("engine.cache.host_memory.AHEAD_BYTES", 4 * block_bytes)
    monkeypatch.setattr("engine.cache.host_memory.pin", pin)
    host = HostKV(cache.block, 4, most_bytes=100 * block_bytes)
    host._pinned = True
    tier = HostTier(host.grow)
    slots: list[tuple[int, ...]] = []
    tier.put(0, 0, (0,), slots.append)
    assert not slots, "there is none yet"
    go_on.set()
    host.prepare(wait=True)
    assert (pinned, host.nbytes) == ([2, 2], 4 * block_bytes), "so much is ready"
    for block in range(9):
        tier.put(0, 0, (block,), slots.append)
        host.prepare(wait=True)
    assert pinned == [2, 2, 2, 2, 2], "one refusal is enough"
    assert [slot for (slot,) in slots] == [0, 1, 2, 3, 4, 5, 6, 7, 0], "from then on the oldest is dropped"
    assert host.nbytes == 8 * block_bytes


def test_how_much_memory_is_taken() -> None:
    assert offload_bytes(None, kv_bytes=10**9, available=100 * 10**9) == 4 * 10**9
    assert offload_bytes(None, kv_bytes=10**10, available=100 * 10**9) == 25 * 10**9
    assert offload_bytes(2.5, kv_bytes=10**9, available=100 * 10**9) == 2.5e9
    assert offload_bytes(1e300, kv_bytes=10**9, available=100 * 10**9) == 75 * 10**9
    assert offload_bytes(500, kv_bytes=10**9, available=100 * 10**9) == 75 * 10**9
    assert offload_bytes(0, kv_bytes=10**9, available=100 * 10**9) == 0


def test_costs_are_those_of_the_fastest_long_chunk() -> None:
    costs = PromptCosts()
    for rows, seconds in ((1000, 0.02), (255, 1e-9), (512, 0.002), (4096, 0.04)):
        costs.saw(rows, seconds)
    assert costs.computed == pytest.approx(0.002 / 512)
    assert costs.worth_it, "nothing was brought back yet"
    costs.brought = 0.002 / 512 / 1.3
    assert costs.worth_it
    costs.brought = 0.002 / 512 / 1.1
    assert not costs.worth_it


def test_a_few_rows_that_came_late_do_not_tell_that_bringing_back_is_slow() -> None:
    costs = PromptCosts(computed=0.002)
    costs.brought_back(16, 0.1)
    assert costs.worth_it
    costs.brought_back(4096, 0.4)
    for _ in range(3):
        costs.brought_back(16, 0.1)
    assert costs.worth_it
    for _ in range(3):
        costs.brought_back(4096, 20.0)
    assert not costs.worth_it


@pytest.fixture
def small(folder: Path) -> Iterator[TinyEngine]:
    """An engine whose cache holds one context, and whose tier holds much more."""
    with tiny_engine(folder, CONFIG, context=512, num_blocks=129, offload=1 << 28) as engine:
        yield engine


def test_a_prompt_that_was_evicted_is_brought_back_and_gives_the_same_logits(small: TinyEngine) -> None:
    prompt = others(400)
    small.warm(prompt)
    small.warm([5, *others(450)])
    small.warm([6, *others(450)])
    small.check()
    computed = small.scripted.rows_computed
    events = list(small.stream(prompt, small.default_params(temperature=0.0, max_tokens=1)))
    assert small.scripted.rows_computed == computed + 1, "the last row alone"
    brought = small.scripted.logits_seen[-1]
    figures = small.figures().offload
    assert figures is not None
    assert (figures.restored_tokens, figures.is_used) == (399, True)
    assert figures.bytes >= figures.blocks * 4
    small.evict_all()
    assert list(small.stream(prompt, small.default_params(temperature=0.0, max_tokens=1))) == events
    assert close_to(small.scripted.logits_seen[-1], brought)


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_a_conversation_that_was_left_is_there_when_one_comes_back(
    small: TinyEngine, think_cache: str
) -> None:
    chat = small.chat(system="You are terse.", think_cache=think_cache)  # type: ignore[arg-type]
    for i in range(3):
        ask(small, chat, f"question {i}", "thoughts", f"the answer with the number {i}")
        chat.settle(wait=True)
    history = chat.history
    small.warm(others(500))
    assert small.cached_rows(history) == len(history)
    computed = small.scripted.rows_computed
    chat.settle(wait=True)
    assert small.scripted.rows_computed == computed, "not even thoughts are thought again"
    small.check()


def test_a_tier_that_loses_is_given_up(small: TinyEngine) -> None:
    small.warm(others(500))
    small.warm([5, *others(500)])
    host = small.pieces.cache.host
    assert host is not None
    host.costs.brought, host.costs.computed = 1e-6, 1.1e-6
    small.warm([6, *others(500)])
    figures = small.figures().offload
    assert figures is not None
    assert (figures.is_used, figures.blocks, figures.bytes) == (False, 0, 0)
    assert small.warm(others(500)) == 500
    small.check()
