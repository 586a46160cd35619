"""How the kernels of a decode step follow each other.

Programmatic dependent launch: a kernel starts while the previous one ends, and waits where it needs its results.

Every kernel of the chain tells its successor to start (`gdc_launch_dependents`) and waits (`gdc_wait`) before it
touches anything that the step itself computes. Before that it may load only weights and data that was final when the
step began. PDL is off on GPUs before sm_90 and in the interpreter.

A product that reads what the one before it reads, too, runs beside it (`wait_for_input` in `linear.py`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import ctypes
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""A CUfunction_attribute of the CUDA driver; its value is a percentage."""


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until the previous kernels have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel of the chain start as soon as all programs of this one have reached this point."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def split_alike(kernel: Any) -> None:
    """Make the launched `kernel` run on multiprocessors with all they can give to shared memory, as prompts leave them.

    A multiprocessor changes how it divides its memory between L1 and shared memory only while it is empty, so kernels
    that ask for different divisions do not overlap. Left to the driver, a step of Qwen3-0.6B on an H100 took 760 us
    after a prompt, and 650 us only after some 250 steps; with one division for all kernels it takes 630 us from the
    first step. It does nothing in the interpreter, which launches no kernel.
    """
    driver = _driver()
    if kernel is not None and driver is not None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), _PREFERRED_SHARED_MEMORY_CARVEOUT, 100)


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return 96 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


@cache
def has_warpgroups(device: torch.device) -> bool:
    """Return whether tensor cores multiply for groups of four warps and read shared memory themselves (sm_90)."""
    is_amd = torch.version.hip is not None  # gfx90a says (9, 0), too
    return device.type == "cuda" and not is_amd and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
