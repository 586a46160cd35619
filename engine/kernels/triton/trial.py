# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A tiny kernel that shows whether Triton can compile and launch anything here."""

import torch
import triton
import triton.language as tl

from engine.kernels.recording import wait_for


@triton.jit
def trial_kernel(x, out):
    tl.store(out, tl.load(x) + 1)


def runs(device: torch.device) -> bool:
    """Launch the kernel; return whether its result is right. Raises whatever Triton and the driver raise."""
    x = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    trial_kernel[(1,)](x, out)
    seen = torch.empty(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    seen.copy_(out, non_blocking=True)
    wait_for(device)  # not by reading `out`: another thread may be recording
    return seen.item() == 1
