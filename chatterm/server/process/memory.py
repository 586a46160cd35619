"""Memory that a process has freed, and that its allocator keeps."""

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Give what is free back to the system, where the allocator can (glibc). It takes some milliseconds.

    Each of glibc's threads frees into a heap of its own, which stays as large as it ever was: after a few long prompts
    that is more than the model's weights.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
