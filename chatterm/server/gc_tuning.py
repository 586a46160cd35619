"""Tunes garbage collection: scanning the objects of loaded models would stop every stream for 0.2 s."""

import gc


def leave_out() -> None:
    """Exclude all present objects from collection, as those of a loaded model stay anyway. Takes no time."""
    gc.set_threshold(10_000, 10, 10)  # tokens on their way to clients are short-lived, but no garbage
    gc.freeze()


def search_all() -> None:
    """Collect everything once, after a model was unloaded; then exclude what is left, as `leave_out` does."""
    gc.unfreeze()
    gc.collect()
    leave_out()
