"""The invariants of block tables. Pure Python, no tensors."""

from collections.abc import Sequence

from engine.cache.block import Block
from engine.cache.block_table import BlockTable
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
