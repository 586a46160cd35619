"""When Python searches for garbage: it stops the screen meanwhile, the longer the more there is to search."""

import gc


def collect_rarely() -> None:
    """Leave out what exists now (modules, above all), and of all else search only what is new.

    A search of the second generation takes 1 to 3 ms: as long as several tokens of a GPU. It waits for `collect_now`.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(2_000, 1_000, 1_000)


def collect_now() -> None:
    """Search what came since the last time, at a moment when nobody waits."""
    gc.collect()
    gc.freeze()
