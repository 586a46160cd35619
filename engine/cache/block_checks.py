"""The invariants of blocks and of the tables that hold them. Pure Python, no tensors."""

from collections.abc import Sequence

from engine.cache.block import Block
from engine.cache.block_table import BlockTable
from engine.cache.groups import Groups
from engine.cache.min_set import MinSet
from engine.cache.prefix_index import PrefixIndex


def table_refs(
    tables: Sequence[BlockTable], blocks: Sequence[Block], index: PrefixIndex, blank: int
) -> list[int]:
    """Return how many of `tables` (all open ones) hold each of `blocks` (all blocks, by id).

    Raises AssertionError unless each table holds the path of its rows, and alone the block that it writes to next.
    """
    refs, size = [0] * len(blocks), index.block_size
    for table in tables:
        held = table.blocks[table.first :]
        assert len(set(held)) == len(held), "a table holds a block twice"
        count = -(-table.length // size)
        assert count <= len(table.blocks), "a table claims rows without a block"
        first = index.first(table.length // size, table.since)
        assert table.first == first, f"a table holds blocks from number {table.first} on, not {first}"
        assert set(table.blocks[:first]) <= {blank}, "a table shows a block that it does not hold"
        path = index.path_to(blocks[table.blocks[count - 1]]) if count else []
        assert len(path) == count
        for number, id in enumerate(table.blocks[first:], first):
            refs[id] += 1
            block = blocks[id]
            rows = min(max(table.length - number * size, 0), size)
            assert len(block.keys) == rows, f"block {id} of a table has {len(block.keys)} rows, not {rows}"
            if rows:
                assert path[number] is block, f"block {id} is not on the path that it is the end of"
            if rows < size:
                assert block.refs == 1, f"writable block {id} is shared"
    return refs


def count_cached(
    blocks: Sequence[Block], refs: Sequence[int], free: MinSet[int], groups: Groups, has_window: bool
) -> int:
    """Return how many of `blocks` (all blocks, by id) are cached: no table holds them, but they have rows.

    Raises AssertionError unless each block has so many holders as in `refs`, and is either free, held or cached.
    """
    cached = 0
    for block in blocks:
        assert block.refs == refs[block.id], (
            f"block {block.id} counts {block.refs} holders, not {refs[block.id]}"
        )
        is_free = block.id in free
        assert not (is_free and block.refs), f"block {block.id} is both free and held"
        assert is_free or block.refs or block.keys, f"block {block.id} is lost"
        assert not (is_free and block.keys), f"free block {block.id} has rows"
        assert not (is_free and groups.holds(block.id)), f"free block {block.id} has a slot"
        cached += bool(block.keys) and block.refs == 0
        for child in () if has_window else block.children:
            assert block.refs or not child.refs, f"block {child.id} is held but not its parent"
    return cached
