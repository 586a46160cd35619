"""The blocks that hold the rows of one sequence."""

from dataclasses import dataclass, field
from sys import maxsize

from engine.cache.live_state import LiveState


class OutOfBlocksError(Exception):
    """More blocks were requested than are free or can be evicted; nothing was changed."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one holder, in order. `length` rows of them are written."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    first: int = 0
    """Blocks before this index were released; the blank block stands in their place."""
    since: int = maxsize
    """Rows from here on are held, whatever the window."""
    group_since: int = maxsize
    """The same for the groups of `engine/cache/groups.py`."""
    firsts: list[int] = field(default_factory=list)
    """The same as `first` for each of the groups: slots there are held from this block on."""
    state: LiveState | None = None
    """None: the network has no recurrent layers, or blocks are brought back, without the log."""
