"""A block of rows as the cache knows it: where it lies, what determines its rows, and its neighbours."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from engine.cache.offload import ROOT_NAME

Key = Hashable
"""Identifies the KV of one row, given the rows before it: a token id, or more if the row was computed with
something in view that is no longer in the table (see `engine/cache/rows.py`)."""

GONE = -1
"""Stands for the id of a block whose rows were evicted."""


@dataclass(slots=True, eq=False)
class Block:
    """One block. `keys[i]` is the key of row i; a row without a key has not been written."""

    id: int
    """The id of the block in the cache's tensors, or GONE."""
    refs: int = 0
    parent: "Block | None" = field(default=None, repr=False)
    """None for the root, where paths begin, and for a block without rows."""
    keys: list[Key] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """The origin of each row in `keys` (see `Sequence.origin`); 0: not recorded."""
    children: "dict[Block, None]" = field(default_factory=dict, repr=False)
    """The blocks that follow this one, in the order in which they were added."""
    indexed: bool = False
    depth: int = 0
    """The number of the block on its path, from 1; 0 for the root."""
    last_used: int = 0
    rank: tuple[int, int, int, int] = (0, 0, 0, GONE)
    """The rank of the block in the order of eviction."""
    name: int = ROOT_NAME
    """The name of a full block in `engine/cache/offload.py`."""

    @property
    def is_gone(self) -> bool:
        """Whether its rows were evicted; also true of the root, which has none."""
        return self.id == GONE
