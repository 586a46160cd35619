"""The set that knows its smallest member, against a plain set."""

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.blocks import BlockManager
from engine.cache.min_set import MinSet
from tests.fresh import examples


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=200))
@examples(50)
def test_it_is_a_set_with_a_smallest_member(changes: list[tuple[bool, int]]) -> None:
    mine, plain, most = MinSet([3, 5]), {3, 5}, 2
    for adds, member in changes:
        (mine.add if adds else mine.discard)(member)
        (plain.add if adds else plain.discard)(member)
        most = max(most, len(plain))
        assert (set(mine), len(mine), member in mine) == (plain, len(plain), member in plain)
        if plain:
            assert mine.smallest() == min(plain)
        assert len(mine._heap) <= 2 * most + 17


def test_opening_and_closing_for_ever_takes_no_memory() -> None:
    manager = BlockManager(16, 4)
    for turn in range(2000):
        table = manager.open([1, 2, 3, 4, turn % 7])
        manager.reserve(table, 6)
        manager.commit(table, range(5 - table.length))
        manager.close(table)
    manager.check()
    assert max(len(manager._eviction._evictable._heap), len(manager._pool._free._heap)) <= 2 * 16 + 17
