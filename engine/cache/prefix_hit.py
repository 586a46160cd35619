"""What the cache held of a prompt when it was admitted, by who had it computed, and where it parts from the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.blocks import BlockManager, BlockTable
from engine.cache.prefix_index import Block, Key


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What was present of a prompt when it was admitted."""

    rows: int = 0
    """Leading rows that were present: those of idle work and of the request itself come last."""
    warmed: int = 0
    """How many of them idle work had computed since the answer before."""
    own: int = 0
    """How many the request itself had."""
    beside: Key | None = None
    """What else follows the rows that were there before all that; None: nothing, or the prompt goes on likewise."""
    beside_warm: Key | None = None
    """What else idle work had computed after the last row that was present."""

    @property
    def reused(self) -> int:
        """Rows that were there when the answer before had ended."""
        return self.rows - self.warmed - self.own


def prefix_hit(blocks: BlockManager, table: BlockTable, keys: Sequence[Key], origin: int) -> PrefixHit:
    """What a table that was just opened holds of the prompt `keys`, for a sequence of this `origin`."""
    rows, pause, path = table.length, abs(origin), blocks.along(table)
    own = _last(blocks, path, rows, origin) if origin < 0 else 0
    warmed = _last(blocks, path, rows - own, pause) if pause else 0
    beside = [key for key, by in _beside(blocks, path, keys, rows - own - warmed) if by != pause]
    beside_warm = [key for key, by in _beside(blocks, path, keys, rows) if by == pause]
    return PrefixHit(rows, warmed, own, next(iter(beside), None), next(iter(beside_warm), None))


def _last(blocks: BlockManager, path: Sequence[Block], end: int, origin: int) -> int:
    """How many rows right before row `end` are of this origin."""
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
    """What follows the first `row` rows of the path other than `keys[row]`, and who had it computed.

    The latest used comes first.
    """
    index, at = divmod(row, blocks.block_size)
    before, wanted = keys[row - at : row], keys[row : row + 1]
    children = blocks.children(path[index - 1] if index else None)
    others = [b for b in children if len(b.keys) > at and b.keys[:at] == before and [b.keys[at]] != wanted]
    others.sort(key=lambda block: block.last_used, reverse=True)
    return [(block.keys[at], block.origins[at]) for block in others]
