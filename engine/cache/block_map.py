"""A picture of the KV blocks for people: which are free, which are cache, which this branch of the chat stands on."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.cache.blocks import BlockManager
from engine.cache.prefix_index import Key


class BlockState(IntEnum):
    """What a block is to the branch that is looked at."""

    FREE = 0
    """Holds nothing."""
    CACHED = 1
    """Of other branches; found again when one of them goes on, evicted when room is needed."""
    HELD = 2
    """Of this branch alone, or reserved by what runs now."""
    SHARED = 3
    """Of this branch and of others."""
    MASKED = 4
    """Of this branch, with an answer whose thinking was taken out and is not attended to."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A snapshot. Token counts are of the branch that was looked at."""

    block_size: int
    """Tokens that a block holds."""
    states: bytes
    """The BlockState of every block, in the order of their ids."""
    path: tuple[int, ...]
    """The branch's blocks in the order of the conversation."""
    tokens: int
    """How many tokens the branch has."""
    present: int
    """How many of them need not be computed."""
    shared: int
    """How many of those stand in blocks that other branches stand on too."""
    hidden: int
    """Tokens of thinking that were taken out of the branch."""
    others: int
    """Branches besides this one that the cache can find."""
    kv_dtype: str = ""
    """Of the numbers in a block."""
    token_bytes: int = 0
    """What a token takes."""

    def count(self, state: BlockState) -> int:
        """How many blocks are in `state`."""
        return self.states.count(state)


def block_map(blocks: BlockManager, keys: Sequence[Key]) -> BlockMap:
    """The blocks as the branch with the rows `keys` sees them. Changes nothing. For the loop's thread."""
    present = blocks.match(keys)
    every = blocks.every
    size = blocks.block_size
    path = blocks.path(keys)
    if path:
        tail, mine = every[path[-1]].keys, keys[(len(path) - 1) * size :]
        if list(mine[: len(tail)]) != tail[: len(mine)]:
            path.pop()  # it begins alike and goes on differently: the branch would copy those rows
    masked_rows, hidden = _masked_rows(keys[:present])
    masked = {row // size for row in masked_rows}
    here = [(index, every[id]) for index, id in enumerate(path) if id != blocks.blank]
    own = {block for _, block in here}
    shared = 0
    for index, block in here:
        if block.children - own or block.refs > 1:
            shared = index + 1
    states = bytearray(len(every))
    leaves = 0
    for block in every:
        leaves += bool(block.keys) and not block.children
        if block.refs:
            states[block.id] = BlockState.HELD
        elif block.keys:
            states[block.id] = BlockState.CACHED
    for index, block in here:
        states[block.id] = BlockState.SHARED if index < shared else BlockState.HELD
        if index in masked:
            states[block.id] = BlockState.MASKED
    own_leaf = bool(path) and not every[path[-1]].children
    return BlockMap(
        block_size=size,
        states=bytes(states),
        path=tuple(block.id for _, block in here),
        tokens=len(keys),
        present=present,
        shared=min(shared * size, present),
        hidden=hidden,
        others=leaves - own_leaf,
    )


def _masked_rows(keys: Sequence[Key]) -> tuple[list[int], int]:
    """The rows that were computed with a span in view that is gone, and how many tokens such spans had.

    A row with the mark `(span)` begins such an answer, a row with another mark ends it (see `engine/cache/rows.py`).
    """
    rows: list[int] = []
    hidden, inside = 0, False
    for row, key in enumerate(keys):
        if isinstance(key, tuple):
            mark = key[1]
            inside = bool(mark) and mark[0] >= 0
            hidden += len(mark) if inside else -mark[0] if mark else 0
        if inside:
            rows.append(row)
    return rows, hidden
