"""Gluon, Triton's language in which a kernel says which thread holds what; what kernels use of it.

Triton's interpreter does not know Gluon. There it is Triton itself that computes, and layouts mean nothing.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,no-redef,untyped-decorator,misc"
from types import SimpleNamespace

import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

__all__ = ["async_copy", "gl", "jit", "layout_of", "mma_v2", "multiply", "own_layout"]
jit = gluon.jit


@gluon.constexpr_function
def layout_of(kind):
    """Of a tensor's type."""
    return kind.layout


@gluon.constexpr_function
def own_layout(warps):
    """Shared memory for tiles of weights [warps, 16, 128]: what a warp reads at once lies side by side.

    A thread reads what it copied there: eight neighbouring columns, of the rows and columns of its `DotOperandLayout`.
    """
    columns, lanes = (
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    )
    rest = [[0, 8, 0], [0, 0, 32], [0, 0, 64], *([1 << i, 0, 0] for i in range(warps.bit_length() - 1))]
    return gl.SharedLinearLayout(columns + lanes + rest)


@jit
def multiply(left, right):
    """left * right, rounded to their dtype: two at a time."""
    return left * right


if knobs.runtime.interpret:

    def _without_layout(name):
        # Looked up at every call: the interpreter puts its own functions into `tl` while it runs a kernel.
        return lambda *given, layout=None, **named: getattr(tl, name)(*given, **named)

    class _Shared:
        """A buffer, or numbered places in it; `stored` is what it holds."""

        def __init__(self, dtype=None, shape=None, layout=None, stored=None):
            self._stored, self._places = stored, {}

        def index(self, number):
            return self._places.setdefault(int(number), _Shared())

        def store(self, value):
            self._stored = value

        def load(self, layout):
            return self._stored

        def permute(self, order):
            return _Shared(stored=tl.permute(self._stored, order))

    def _copy(place, at, mask=None):
        place.store(tl.load(at) if mask is None else tl.load(at, mask=mask, other=0.0))

    def _nothing(*_):
        pass

    async_copy = SimpleNamespace(
        async_copy_global_to_shared=_copy, commit_group=_nothing, wait_group=_nothing
    )
    _same = (
        *("arange", "zeros", "expand_dims", "load", "store", "sum", "max", "maximum"),
        *("program_id", "num_programs"),
        *("exp", "exp2", "log2", "rsqrt", "split", "where", "reshape", "permute"),
    )
    gl = SimpleNamespace(
        NVMMADistributedLayout=gl.NVMMADistributedLayout,
        DotOperandLayout=gl.DotOperandLayout,
        SliceLayout=gl.SliceLayout,
        BlockedLayout=gl.BlockedLayout,
        convert_layout=lambda given, layout: given,
        SwizzledSharedLayout=gl.SwizzledSharedLayout,
        allocate_shared_memory=_Shared,
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
        return

    def own_layout(warps):
        """Nothing."""
        return
