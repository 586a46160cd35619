"""The checksum of what is written and read: CRC-32 as zlib computes it, by the native library where there is one."""

import ctypes
from functools import cache
from typing import Any
from zlib import crc32 as slow_crc32

from engine.kernels.native.library import NativeError, library


def crc32(data: memoryview) -> int:
    """Return the CRC-32 of contiguous bytes. Other threads run meanwhile if there are more than a few."""
    native = _native()
    if native is None or data.readonly:  # ctypes takes no address of what must not be written
        return slow_crc32(data)
    return int(native.ct_crc32(ctypes.byref(ctypes.c_char.from_buffer(data)), data.nbytes))


@cache
def _native() -> Any:
    """Return the functions of the native library; None if it is missing, or slower here."""
    try:
        functions = library().functions
    except NativeError:
        return None
    return functions if functions.ct_crc32_works() else None
