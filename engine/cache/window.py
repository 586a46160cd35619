"""The part of the KV cache that a network needs if all its layers have a sliding window: the end of the sequence.

    [0 1 2 3] [4 5 6 7] [8 9 . .]        blocks of 4 rows, a window of 4: the next row, 10, sees rows 7 to 10
    released    held      held

A table releases a block as soon as no later row sees any of its rows. The block then stays in the cache, like all
blocks that no sequence holds, until it is evicted. It is never read through that table again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a network in which no layer sees further back than `rows` rows, the row itself included."""

    rows: int
    step: int
    """The most rows that are computed at once."""

    def first(self, blocks: int, size: int) -> int:
        """Return the first block (of `size` rows) that rows after `blocks` full blocks see, at most `blocks` - 1.

        It depends on whole blocks only, so the blocks of a sequence let it continue from any row of its last block.
        """
        return max(blocks * size - max(self.rows - 1, 1), 0) // size

    def most_blocks(self, size: int) -> int:
        """Return the most blocks that a sequence holds, however long it is."""
        return -(-(self.rows + self.step) // size) + 2

    def most_held(self, rows: int, size: int) -> int:
        """Return the most blocks that a sequence holds until it has `rows` rows."""
        return min(-(-rows // size), self.most_blocks(size))
