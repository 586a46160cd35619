"""A snapshot of the KV blocks for display: which are free, which are cached, which belong to this branch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.cache.block import Block, Key
from engine.cache.blocks import BlockManager


class BlockState(IntEnum):
    """The state of a block, relative to the branch being looked at."""

    FREE = 0
    """The block holds nothing."""
    CACHED = 1
    """Belongs to other branches; reused when one of them continues, evicted when room is needed."""
    HELD = 2
    """Belongs to this branch alone, or is reserved for what is running now."""
    SHARED = 3
    """Shared by this branch and others."""
    MASKED = 4
    """Belongs to this branch, with an answer whose thinking was taken out of view."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A snapshot. Token counts are for the branch being looked at."""

    block_size: int
    """Tokens per block."""
    states: bytes
    """The BlockState of every block, as bytes in the order of the ids."""
    path: tuple[int, ...]
    """The branch's blocks in the order of the conversation."""
    tokens: int
    """The number of tokens of the branch."""
    present: int
    """How many of them need not be computed."""
    shared: int
    """How many of those are in blocks that other branches share."""
    hidden: int
    """Tokens of thinking that were taken out of the branch."""
    others: int
    """The number of other branches in the cache."""
    kv_dtype: str = ""
    """The format of the numbers in a block."""
    token_bytes: int = 0
    """Bytes per token."""
    marks: int | None = None
    """After how many tokens of the branch states of recurrent layers are kept; None: there are no such layers."""

    def count(self, state: BlockState) -> int:
        """Return how many blocks are in `state`."""
        return self.states.count(state)


def block_map(blocks: BlockManager, keys: Sequence[Key]) -> BlockMap:
    """Return the blocks as seen from the branch with these `keys`. Changes nothing. Call it on the loop's thread."""
    present = blocks.match(keys)
    every = blocks.every
    size = blocks.block_size
    path = blocks.path(keys)
    if path and not _agree(every[path[-1]], keys[(len(path) - 1) * size :]):
        path.pop()  # it diverges within this block, so the branch would copy the matching rows
    masked_rows, hidden = _masked_rows(keys[:present])
    masked = {row // size for row in masked_rows}
    here = [(index, every[id]) for index, id in enumerate(path) if id != blocks.blank]
    own = {block for _, block in here}
    # Where windows have lost rows, the path ends before the branch does.
    branch = blocks.index.chain(keys)
    end, _ = blocks.index.go_on(branch, keys)
    own.update(branch)
    if end is not None and _agree(end, keys[len(branch) * size :]):
        own.add(end)
    shared = 0
    for index, block in here:
        if block.children.keys() - own or block.refs > 1:
            shared = index + 1
    states = bytearray(len(every))
    others = 0
    for block in every:
        others += bool(block.keys) and not block.children and block not in own
        if block.refs:
            states[block.id] = BlockState.HELD
        elif block.keys:
            states[block.id] = BlockState.CACHED
    for index, block in here:
        states[block.id] = BlockState.SHARED if index < shared else BlockState.HELD
        if index in masked:
            states[block.id] = BlockState.MASKED
    return BlockMap(
        block_size=size,
        states=bytes(states),
        path=tuple(block.id for _, block in here),
        tokens=len(keys),
        present=present,
        shared=min(shared * size, present),
        hidden=hidden,
        others=others,
        marks=_marks(blocks, keys),
    )


def _agree(block: Block, keys: Sequence[Key]) -> bool:
    """Return whether the keys of `block` are the first of `keys`, or begin with all of them."""
    return list(keys[: len(block.keys)]) == block.keys[: len(keys)]


def _marks(blocks: BlockManager, keys: Sequence[Key]) -> int | None:
    if blocks.marks is None:
        return None
    return sum(1 for _ in blocks.marks.along([blocks.index.root, *blocks.index.chain(keys)], keys))


def _masked_rows(keys: Sequence[Key]) -> tuple[list[int], int]:
    """Return the rows computed with a span in view that is now hidden, and the number of tokens in such spans.

    A row with the mark `(span)` begins such an answer, a row with any other mark ends it (see `engine/cache/rows.py`).
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
