"""When Python searches for garbage: it stops the screen meanwhile, the longer the more there is to search."""

import gc

_MANY = 50_000
"""Objects that are searched in about 10 ms."""


def collect_rarely() -> None:
    """Leave out what exists now (modules, above all), and of all else search only what is new.

    Each line that is drawn becomes garbage that refers to itself (Textual keeps parts of a strip with the strip). At
    1,000 tokens/s the second generation gets 7,000 such objects a second: searched every half second that takes 5 to
    10 ms, left for a minute it is a pause of 0.9 s in the middle of an answer. The third waits for `collect_now`.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000)


def collect_now() -> None:
    """Search what came since `collect_rarely`, at a moment when nobody waits.

    What is alive then is searched again the next time, for lines that are on the screen at such a moment would never
    be freed: 370 bytes a token. Only if that is a lot, because a session was opened, it is left out from now on
    without a search, which would take longer, the longer the session is.
    """
    # Counted without a step of Python between: a thread that ran while the list is there and was just making a tuple
    # of a generator would end in a SystemError, for the list refers to that tuple, too.
    (count,) = map(len, map(gc.get_objects, (None,)))
    if count > _MANY:
        gc.freeze()
    else:
        gc.collect()
