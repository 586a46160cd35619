"""Tuning of Python's garbage collector, which pauses the screen for a time proportional to the objects it searches."""

import gc
import sys

_MANY = 30_000
"""Objects searched in about 10 ms."""
_BLOCKS = 4 * _MANY
"""Blocks of memory that belong to more objects than that; counting them would take long, too."""
_SURVIVING = 20_000
"""Blocks of memory of some 10,000 objects, which several answers leave."""


class Garbage:
    """Collects garbage when it holds up nobody."""

    __slots__ = ("_excluded",)

    def __init__(self) -> None:
        self._excluded = 0
        """Blocks of memory that belong to objects that are excluded from collection, and to everything else then."""

    def collect_rarely(self) -> None:
        """Exclude existing objects (mostly modules) from collection, and of later ones search only new ones.

        Each drawn line becomes cyclic garbage (Textual caches parts of a strip in the strip). At 1,000 tokens/s the
        second generation gets 7,000 such objects a second: a collection every half second takes 5 to 10 ms, one after
        a minute would pause an answer for 0.9 s. The third generation waits for `collect_now`.
        """
        gc.enable()
        self._exclude()
        gc.set_threshold(1_000, 5, 1_000_000)

    def collect_now(self) -> None:
        """Collect garbage made since `collect_rarely`; call it when the chat is idle.

        Lines on the screen are never freed if they are excluded: 370 bytes a token, if that was done after each answer.
        So survivors are excluded only once they are many, that is every few answers, and without a collection only if
        that would take long, because a session was opened.
        """
        if sys.getallocatedblocks() - self._excluded > _BLOCKS or _count() > _MANY:
            self._exclude()
            return
        gc.collect()
        if sys.getallocatedblocks() - self._excluded > _SURVIVING:
            self._exclude()

    def _exclude(self) -> None:
        gc.freeze()
        self._excluded = sys.getallocatedblocks()


def _count() -> int:
    """Return the number of objects that a collection would search."""
    # Counted inside one C call: the list refers to every tracked tuple, and a thread switch to one that is building a
    # tuple from a generator would end in a SystemError.
    (count,) = map(len, map(gc.get_objects, (None,)))
    return count
