"""Notices that an answer repeats itself without end, as small models do at low temperatures.

A long table of zeros, or a line that was asked for a hundred times, must not be taken for a loop; a loop only costs
time until it is noticed. So the bounds are high: 1,024 tokens that are the same line over and over, to the token, are
50 to 100 lines. Lines that are numbered, and rows of a table that differ by one character, are never a loop.
"""

from collections.abc import Sequence

FEWEST_TOKENS = 1024
"""How many tokens must be repetition."""
FEWEST_REPEATS = 8
"""How often a passage must follow itself."""
LONGEST_PASSAGE = 512
"""Tokens of a passage that is noticed."""
STRIDE = 64
"""Tokens between two looks, so that a look costs less than a microsecond per token."""
_COMPARED = 8


def repeats(ids: Sequence[int], first: int = 0) -> bool:
    """Return whether `ids[first:]` ends in one passage over and over; False except after every `STRIDE` tokens."""
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
