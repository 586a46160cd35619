"""When Python searches for garbage: it stops the screen meanwhile, the longer the more there is to search."""

import gc


def collect_rarely() -> None:
    """Leave out what exists now (modules, above all), and search all else seldom."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000)


def collect_now() -> None:
    """Search what came since the last time, at a moment when nobody waits."""
    gc.collect()
    gc.freeze()
