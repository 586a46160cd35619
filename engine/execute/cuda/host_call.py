"""Calls of C functions in stream order: the host runs each once all work before it is done.

A recording keeps them like kernels. The functions must not use CUDA, and no Python thread is needed to run them.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from engine.device import is_amd


def problem() -> str | None:
    """Return why such calls are unavailable here, as the middle of a sentence; None if they are available."""
    if is_amd():
        return "only the driver of an NVIDIA GPU calls functions on the host"
    try:
        _driver()
    except (OSError, AttributeError):
        return "the GPU's driver cannot call functions on the host"
    return None


def enqueue_call(function: int, data: ctypes.Structure) -> None:
    """Make the current stream call the C function at address `function` with the address of `data`. `data` must stay in
    place as long as a recording of the call may be replayed. Raises RuntimeError when the driver refuses."""
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
