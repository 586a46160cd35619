"""Gluon, Triton's language in which a kernel says which thread holds what; what kernels use of it.

Triton's interpreter does not know Gluon. There it is Triton itself that computes, and layouts mean nothing.
"""

# mypy: disable-error-code="no-untyped-def,attr-defined,no-redef"
from types import SimpleNamespace

import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

jit = gluon.jit


@gluon.constexpr_function
def layout_of(kind):
    """Of a tensor's type."""
    return kind.layout


@jit
def multiply(left, right):
    """left * right, rounded to their dtype: two at a time."""
    return left * right


if knobs.runtime.interpret:

    def _without_layout(name):
        # Looked up at every call: the interpreter puts its own functions into `tl` while it runs a kernel.
        return lambda *given, layout=None, **named: getattr(tl, name)(*given, **named)

    _same = ("arange", "zeros", "expand_dims", "load", "store", "sum", "program_id", "exp", "rsqrt", "split", "where")
    gl = SimpleNamespace(
        NVMMADistributedLayout=gl.NVMMADistributedLayout,
        DotOperandLayout=gl.DotOperandLayout,
        SliceLayout=gl.SliceLayout,
        BlockedLayout=gl.BlockedLayout,
        convert_layout=lambda given, layout: given,
        reshape=_without_layout("reshape"),
        permute=_without_layout("permute"),
        **{name: _without_layout(name) for name in _same},
    )
    jit = triton.jit

    def mma_v2(left, right, sums):
        """left @ right + sums."""
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")

    def multiply(left, right):
        """In fp32, as the interpreter multiplies nothing narrower."""
        return (left.to(tl.float32) * right.to(tl.float32)).to(left.dtype)

    def layout_of(kind):
        """Nothing."""
        return None
