"""Tuning of Python's garbage collector, which pauses the screen for a time proportional to the objects it searches."""

import gc

_MANY = 50_000
"""Objects searched in about 10 ms."""


def collect_rarely() -> None:
    """Exclude existing objects (mostly modules) from collection, and of later ones search only new ones.

    Each drawn line becomes cyclic garbage (Textual caches parts of a strip in the strip). At 1,000 tokens/s the
    second generation gets 7,000 such objects a second: a collection every half second takes 5 to 10 ms, one after a
    minute would pause an answer for 0.9 s. The third generation waits for `collect_now`.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000)


def collect_now() -> None:
    """Collect garbage made since `collect_rarely`; call it when the chat is idle.

    Surviving objects are not excluded, since lines on the screen at that moment would then never be freed: 370 bytes
    a token. Only if there are more than `_MANY`, because a session was opened, they are excluded without a
    collection, which would take time proportional to the session's length.
    """
    # Count inside one C call: the list refers to every tracked tuple, and a thread switch to one that is building a
    # tuple from a generator would end in a SystemError.
    (count,) = map(len, map(gc.get_objects, (None,)))
    if count > _MANY:
        gc.freeze()
    else:
        gc.collect()
