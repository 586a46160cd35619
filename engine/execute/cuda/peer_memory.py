"""GPU memory that the processes of other GPUs read and write like their own, through CUDA IPC.

Torch offers `symmetric_memory`, but its interface still changes and needs a named process group. A few calls of the
driver are enough here.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from engine.kernels.recording import wait_for

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The memory of every rank, as addresses valid in this process."""

    addresses: tuple[int, ...]
    close: Callable[[], None]
    """Release all of it."""


@dataclass(frozen=True, slots=True)
class _Array:
    """Memory as torch takes it (the CUDA array interface)."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the memory of this process from `address` on as a tensor; whoever owns it must outlive the tensor."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type == "cuda":
        found = torch.as_tensor(_Array(address, nbytes), device=device)
    else:
        found = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return found.view(dtype).view(shape)


def share_memory(
    nbytes: int, rank: int, device: torch.device, swap: Callable[[bytes], list[bytes]]
) -> PeerMemory:
    """Allocate `nbytes` zeros on `device`, and open the memory of the other ranks; `swap` is `Group.swap`.

    Raises RuntimeError where the GPUs cannot address each other's memory.
    """
    wait_for(device)  # the driver's calls need the context that torch makes
    own = ctypes.c_uint64()
    opened: list[ctypes.c_uint64] = []

    def close() -> None:
        wait_for(device)
        for address in opened:
            _driver().cuIpcCloseMemHandle(address)
        _driver().cuMemFree_v2(own)

    handle, failed = _Handle(), None
    try:
        _check(_driver().cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(nbytes)))
        _check(_driver().cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes)))
        wait_for(device)
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), own))
    except RuntimeError as error:
        failed = error
    try:
        addresses = []
        for other, data in enumerate(
            swap(b"" if failed else bytes(handle))
        ):  # a failed rank also swaps, so no rank waits for it
            if failed is not None:
                raise failed
            if other == rank:
                addresses.append(int(own.value))
                continue
            address = ctypes.c_uint64()
            if len(data) != _HANDLE_BYTES:
                raise RuntimeError("another GPU cannot share its memory")
            theirs = _Handle.from_buffer_copy(data)
            _check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), theirs, _LAZY_PEER_ACCESS))
            opened.append(address)
            addresses.append(int(address.value))
    except BaseException:
        close()
        raise
    return PeerMemory(tuple(addresses), close)


def _check(error: int) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        raise RuntimeError(f"the GPUs cannot share memory ({(name.value or b'unknown').decode()})")


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if ctypes.sizeof(ctypes.c_wchar) == 2 else "libcuda.so.1")
