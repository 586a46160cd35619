"""Returns memory to the system that is free but kept by the allocator."""

import ctypes
from collections.abc import Callable
from functools import cache


def trim_heap() -> None:
    """Return free memory to the system if the allocator can (glibc). Takes some milliseconds.

    In glibc each thread frees into its own heap, which never shrinks by itself: after a few long prompts these heaps
    are larger than the model's weights.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
