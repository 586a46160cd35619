# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Copies rows of the KV cache to other slots, for all layers and both K and V in one launch.

The plain twin is `engine.cache.kv_cache.copy_rows_reference`.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(kv, slots, count, plane_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Copy one row of one plane; a plane is K or V of one layer."""
    row, plane = tl.program_id(0), tl.program_id(1)
    source, target = tl.load(slots + row), tl.load(slots + count + row)
    # A cache may have more than 2**31 elements; the slots are int64 already.
    at = kv + plane.to(tl.int64) * plane_stride
    element = tl.arange(0, PADDED)
    inside = element < WIDTH
    tl.store(at + target * WIDTH + element, tl.load(at + source * WIDTH + element, inside), inside)


def copy_rows(kv: Tensor, slots: Tensor) -> None:
    """Copy the rows at slots[0] to slots[1]; no slot may be in both.

    kv [1 or 2, layers, slots, ...], contiguous; slots int64 [2, n], contiguous.
    """
    width = kv[0, 0, 0].numel()
    planes, rows = kv.shape[0] * kv.shape[1], slots.shape[1]
    if rows == 0:
        return
    _copy_kernel[(rows, planes)](
        kv, slots, rows, kv.stride(1), WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=4
    )
