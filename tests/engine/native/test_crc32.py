"""The checksum of the native library is zlib's, whatever the length and the address."""

import ctypes
from random import Random
from zlib import crc32

import pytest

from engine.kernels.native.library import NativeLibrary


@pytest.mark.parametrize("start", [0, 1, 13])
def test_it_is_that_of_zlib(library: NativeLibrary, start: int) -> None:
    if not library.functions.ct_crc32_works():
        pytest.skip("this machine lacks the instruction")
    for count in (0, 1, 15, 63, 64, 65, 127, 128, 129, 191, 192, 1000, 4096, 70_001):
        data = bytearray(Random(count).randbytes(start + count))
        there = (ctypes.c_char * (start + count)).from_buffer(data)
        found = library.functions.ct_crc32(ctypes.addressof(there) + start, count)
        assert found == crc32(data[start:]), f"{count} bytes"
