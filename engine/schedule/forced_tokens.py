"""Tokens not yet drawn under a constraint: which ones must come next, and which guesses are allowed."""

from collections.abc import Sequence as Items

from engine.errors import EngineError
from engine.schedule.channel_guide import ChannelGuide
from engine.schedule.guide import Guide
from engine.schedule.sequence import Sequence

MOST_FORCED = 64
"""The most forced tokens that are taken at once; the rest is forced again after the next token."""
FEWEST_FORCED = 4
"""The fewest forced tokens, per sequence in a slot, for which one leaves its slot: while it computes their rows as a
prompt's, the others wait."""


def is_to_jump(sequence: Sequence, together: int) -> bool:
    """Return whether a constrained sequence, one of `together` in slots, leaves its slot to take forced tokens.

    The rows of those tokens get other bits than decoding would give them, so no guess may be checked before them.
    """
    assert sequence.guide is not None
    sequence.guide.follow(sequence.generated)
    return _forces(sequence, sequence.guide, together)


def permitted(sequence: Sequence, guesses: Items[int], together: int) -> int:
    """Return how many of the guesses after all known tokens of a constrained sequence its constraint allows and its
    slot, one of `together`, would draw."""
    guide = sequence.guide
    assert guide is not None
    guide.follow(sequence.generated)
    if not guesses or _forces(sequence, guide, together):
        return 0
    ahead = guide.copy()
    for count, guess in enumerate(guesses):
        if not ahead.allows(guess):
            return count
        if guess in ahead.stop_ids:
            return count + 1
        try:
            ahead.push(guess)
        except EngineError:  # the grammar is too complex: drawing this token reports it
            return count
        if _forces(sequence, ahead, together):
            return count
    return len(guesses)


def _forces(sequence: Sequence, guide: Guide | ChannelGuide, together: int) -> bool:
    params = sequence.params
    assert params is not None
    return params.logprobs is None and len(guide.forced()) >= FEWEST_FORCED * together
