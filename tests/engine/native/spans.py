"""Spans as the native kernels' tests write them."""

from collections.abc import Sequence

from engine.batch import Span


def a_span(
    tokens: Sequence[int], start: int, positions: Sequence[int], blocks: Sequence[int], wanted: bool = True
) -> Span:
    """Tokens of one sequence, which lie from row `start` of a table of `blocks` on, with a position each."""
    return Span(tuple(blocks), start, len(tokens), tokens, positions, wanted)
