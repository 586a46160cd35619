"""When Python searches for garbage: not in what a process has loaded, or every stream stops for 0.2 s meanwhile."""

import gc


def leave_out() -> None:
    """Search only what is new from now on: of a model that was loaded everything stays. Takes no time."""
    gc.set_threshold(10_000, 10, 10)  # tokens on their way to clients are soon gone, and no garbage
    gc.freeze()


def search_all() -> None:
    """Search everything once, for a model is gone; then as `leave_out`."""
    gc.unfreeze()
    gc.collect()
    leave_out()
