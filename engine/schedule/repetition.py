"""Detects answers that repeat themselves endlessly, as those of small models do at low temperatures.

A long table of zeros, or a line that was requested a hundred times, must not be taken for a loop, whereas a loop that
is detected late only costs time. So the bounds are high: 1,024 tokens of exactly the same line are 50 to 100 lines.
Numbered lines, and rows of a table that differ by one character, never count as a loop.
"""

from collections.abc import Sequence

FEWEST_TOKENS = 1024
"""The fewest tokens that the repeated passages must have together."""
FEWEST_REPEATS = 8
"""How often a passage must follow itself."""
LONGEST_PASSAGE = 512
"""The most tokens of a passage whose repetition is detected."""
STRIDE = 64
"""Tokens between two checks, so that checking costs less than a microsecond per token."""
_COMPARED = 8


def repeats(ids: Sequence[int], first: int = 0) -> bool:
    """Return whether `ids[first:]` ends in the same passage over and over.

    It is checked only after every STRIDE tokens, and otherwise False is returned.
    """
    count = len(ids) - first
    if count % STRIDE or count < FEWEST_TOKENS:
        return False
    newest, last = ids[-_COMPARED:], ids[-1]
    for size in range(1, min(LONGEST_PASSAGE, count // FEWEST_REPEATS) + 1):
        if ids[-1 - size] != last or ids[-_COMPARED - size : -size] != newest:
            continue
        tail = max(FEWEST_TOKENS, FEWEST_REPEATS * size)
        if ids[-tail:-size] == ids[size - tail :]:
            return True
    return False
