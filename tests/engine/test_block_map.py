"""The picture of the blocks: states, counts, what branches share."""

from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block_map import BlockMap, BlockState, block_map
from engine.cache.blocks import BlockManager
from engine.cache.group_pool import GroupPool
from engine.cache.rows import Rows
from engine.cache.window import Window
from engine.errors import EngineError
from engine.params import SamplingParams
from tests.counting import PATIENCE
from tests.engine.test_blocks import filled
from tests.engine.tiny import say, tiny_engine

FREE, CACHED, HELD, SHARED, MASKED = BlockState


def states(found: BlockMap) -> list[BlockState]:
    return [BlockState(state) for state in found.states]


def test_an_empty_cache_is_free() -> None:
    found = block_map(BlockManager(3, 4), [1, 2])
    assert states(found) == [FREE] * 3
    assert (found.path, found.tokens, found.present, found.others) == ((), 2, 0, 0)


def test_two_branches_share_their_beginning() -> None:
    manager = BlockManager(8, 2)
    for keys in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9], [20, 21]):
        manager.close(filled(manager, keys))
    found = block_map(manager, [1, 2, 3, 4, 7, 8, 9, 10])
    assert [BlockState(found.states[id]) for id in found.path] == [SHARED, SHARED, HELD, HELD]
    assert (found.tokens, found.present, found.shared, found.others) == (8, 7, 4, 2)
    assert (found.count(CACHED), found.count(FREE)) == (2, 2)


def test_a_block_that_goes_on_differently_belongs_to_the_other_branch() -> None:
    manager = BlockManager(4, 4)
    manager.close(filled(manager, [1, 2, 3, 4, 5, 6, 7, 8]))
    found = block_map(manager, [1, 2, 3, 4, 5, 6, 99])
    assert (found.path, found.present, found.shared, found.others) == ((0,), 6, 4, 1)
    assert states(found) == [SHARED, CACHED, FREE, FREE]


def test_a_branch_whose_windows_lost_rows_is_no_other_branch() -> None:
    manager = BlockManager(8, 2, pools=[GroupPool(4, Window(3, 2))])
    for keys in ([1, 2, 3, 4, 5, 6, 7], [20, 21, 22, 23, 24, 25, 26]):
        manager.close(filled(manager, keys))
    for keys in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]):
        found = block_map(manager, keys)
        assert found.present < 7, "the other branch took the slots"
        assert (found.shared, found.others) == (0, 1)


def test_what_runs_is_held_and_what_two_hold_is_shared() -> None:
    manager = BlockManager(6, 2)
    table = filled(manager, [1, 2, 3])
    manager.reserve(table, 3)
    assert states(block_map(manager, [1, 2, 3])) == [HELD, HELD, HELD, FREE, FREE, FREE]
    filled(manager, [1, 2])
    assert states(block_map(manager, [1, 2, 3]))[:2] == [SHARED, HELD]


def test_answers_whose_thinking_was_taken_out_are_marked() -> None:
    rows = Rows.of([1, 2, 3, 4, 5, 6, 7, 8]).hide([(2, 5)])
    rows.extend([9, 10])
    manager = BlockManager(4, 2)
    table = manager.open([])
    manager.reserve(table, len(rows))
    manager.commit(table, rows.keys)
    found = block_map(manager, rows.keys)
    assert [BlockState(found.states[id]) for id in found.path] == [HELD, MASKED, MASKED, HELD]
    assert found.hidden == 3


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=8), st.integers(0, 7))
def test_every_block_counts_once(paths: list[list[int]], chosen: int) -> None:
    manager = BlockManager(40, 2)
    for keys in paths:
        manager.close(filled(manager, keys))
    keys = paths[chosen % len(paths)] if paths else [1]
    found = block_map(manager, keys)
    assert len(found.states) == 40
    assert found.count(FREE) == manager.num_free
    assert found.count(HELD) + found.count(SHARED) == len(found.path)
    assert found.count(CACHED) == manager.num_cached - len(found.path)
    assert found.present == (len(keys) if paths else 0)
    assert found.shared <= found.present


def test_the_engine_shows_its_blocks_and_a_retry_shares_the_history(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        chat = engine.chat()
        engine.scripted.script = say(engine, None, "one two three four")
        list(chat.send("hello", SamplingParams(temperature=0.0)))
        engine.scripted.script = say(engine, None, "five six seven")
        list(chat.retry(SamplingParams(temperature=0.0)))
        chat.settle(wait=True)
        maps: list[BlockMap] = []
        seen = Event()
        engine.look_at_blocks(chat.history.keys, lambda found: (maps.append(found), seen.set()))
        assert seen.wait(PATIENCE)
        assert maps[0].present == maps[0].tokens > maps[0].shared > 0
        assert maps[0].others == 1
        assert maps[0].count(SHARED) == maps[0].shared // 4
    with pytest.raises(EngineError, match="closed"):
        engine.look_at_blocks([], maps.append)
