"""What a network all of whose layers have a sliding window needs of its KV cache: the rows at the end of a sequence.

    [0 1 2 3] [4 5 6 7] [8 9 . .]        blocks of 4 rows, a window of 4: the next row, 10, sees rows 7 to 10
     let go      held      held

A table lets go of a block as soon as no later row sees one of its rows. Nobody has to hold it then, but it stays as
cache, like all that nobody holds, until somebody needs the room; and it is never read through that table again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Of a network in which no layer sees further back than `rows` rows, the row itself included."""

    rows: int
    step: int
    """Most rows that are computed at once."""

    def first(self, blocks: int, size: int) -> int:
        """The first block, of `size` rows each, that rows behind `blocks` full ones see; the last of those at least.

        It depends on whole blocks alone: what a sequence holds is enough to go on from any row of its last block.
        """
        return max(blocks * size - max(self.rows - 1, 1), 0) // size

    def most_blocks(self, size: int) -> int:
        """How many blocks a sequence holds at most, however long it is."""
        return -(-(self.rows + self.step) // size) + 2
