"""What a constraint says of tokens that are not drawn yet: those that must come, and guesses that may."""

from collections.abc import Sequence as Items

from engine.errors import EngineError
from engine.schedule.channel_guide import ChannelGuide
from engine.schedule.guide import Guide
from engine.schedule.sequence import Sequence

MOST_FORCED = 64
"""Tokens that a constraint puts in at once; what it forces beyond them comes with the next token."""
FEWEST_FORCED = 4
"""So many at least for each sequence in a slot: others wait while what one is forced to say is computed as a prompt."""


def is_to_jump(sequence: Sequence, together: int) -> bool:
    """Whether a constrained sequence, one of so many in slots, leaves its slot for what it is forced to say next.

    The rows of those tokens have other bits than decoding gives: no guess may come before that.
    """
    assert sequence.guide is not None
    sequence.guide.follow(sequence.generated)
    return _forces(sequence, sequence.guide, together)


def permitted(sequence: Sequence, guesses: Items[int], together: int) -> int:
    """How many of the guesses of what comes after all known tokens of a constrained sequence may come, and would be
    drawn in its slot, one of `together`."""
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
        except EngineError:  # the grammar is too complex: who draws this token is told
            return count
        if _forces(sequence, ahead, together):
            return count
    return len(guesses)


def _forces(sequence: Sequence, guide: Guide | ChannelGuide, together: int) -> bool:
    params = sequence.params
    assert params is not None
    return params.logprobs is None and len(guide.forced()) >= FEWEST_FORCED * together
