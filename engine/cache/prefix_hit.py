"""What was cached of a prompt when it was admitted, which work had computed it, and where the prompt diverges."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.block import Block, Key
from engine.cache.block_table import BlockTable
from engine.cache.blocks import BlockManager


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The part of a prompt that was present when it was admitted."""

    rows: int = 0
    """Leading rows that were present; rows of idle work, and then of the request itself, come last."""
    warmed: int = 0
    """How many of them idle work had computed since the previous answer."""
    own: int = 0
    """How many of them the request itself had computed."""
    known: int = 0
    """Leading rows of which all was present but the states of recurrent layers; 0 without such layers."""
    beside: Key | None = None
    """The key in the cache that follows the reused rows instead of the prompt's next key; None: there is none."""
    beside_warm: Key | None = None
    """The key that idle work had computed after the last row present, other than the prompt's next; None: none."""

    @property
    def reused(self) -> int:
        """Rows that were present when the previous answer had ended."""
        return self.rows - self.warmed - self.own


def prefix_hit(blocks: BlockManager, table: BlockTable, keys: Sequence[Key], origin: int) -> PrefixHit:
    """Return what a newly opened table holds of the prompt `keys`, for a sequence of this `origin`."""
    rows, pause, path = table.length, abs(origin), blocks.along(table)
    own = _last(blocks, path, rows, origin) if origin < 0 else 0
    warmed = _last(blocks, path, rows - own, pause) if pause else 0
    beside = [key for key, by in _beside(blocks, path, keys, rows - own - warmed) if by != pause]
    beside_warm = [key for key, by in _beside(blocks, path, keys, rows) if by == pause]
    known = table.state.fork if table.state is not None else 0
    return PrefixHit(rows, warmed, own, known, next(iter(beside), None), next(iter(beside_warm), None))


def _last(blocks: BlockManager, path: Sequence[Block], end: int, origin: int) -> int:
    """Return how many rows right before row `end` have this origin."""
    row, size = end, blocks.block_size
    while row:
        index = (row - 1) // size
        origins = path[index].origins[: row - index * size]
        last = next((n for n, by in enumerate(reversed(origins)) if by != origin), len(origins))
        row -= last
        if last < len(origins):
            break
    return end - row


def _beside(
    blocks: BlockManager, path: Sequence[Block], keys: Sequence[Key], row: int
) -> list[tuple[Key, int]]:
    """Return the keys other than `keys[row]` that follow the first `row` rows of the path, with their origins.

    The most recently used comes first.
    """
    index, at = divmod(row, blocks.block_size)
    before, wanted = keys[row - at : row], keys[row : row + 1]
    children = (path[index - 1] if index else blocks.index.root).children
    others = [b for b in children if len(b.keys) > at and b.keys[:at] == before and [b.keys[at]] != wanted]
    others.sort(key=lambda block: block.last_used, reverse=True)
    return [(block.keys[at], block.origins[at]) for block in others]
