"""Calls of C functions in the order of a stream: they run on the host once everything before them is done.

A recording keeps them like kernels. They must not use CUDA, and nobody of Python's is needed to run them.
"""

import ctypes
from functools import cache
from typing import Any

import torch


def problem() -> str | None:
    """Why there are no such calls here, as the middle of a sentence; None where there are."""
    try:
        _driver()
    except (OSError, AttributeError):
        return "the GPU's driver cannot call functions on the host"
    return None


def enqueue_call(function: int, data: ctypes.Structure) -> None:
    """Have the current stream call the C function at address `function` with the address of `data`, which must stay
    there: as long as a recording of it is replayed. Raises RuntimeError when the driver refuses."""
    stream = torch.cuda.current_stream().cuda_stream
    failed = _driver().cuLaunchHostFunc(stream, function, ctypes.addressof(data))
    if failed:
        raise RuntimeError(f"the GPU's driver cannot call functions on the host (error {failed})")


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("nvcuda.dll" if ctypes.sizeof(ctypes.c_wchar) == 2 else "libcuda.so.1")
    driver.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    driver.cuLaunchHostFunc.restype = ctypes.c_int
    return driver
