"""Where the columns of a product are: their numbers, by thread, and what is loaded there.

The warps of a program divide the columns, SPAN each at a time (see `linear.py`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
import triton.language as tl

from engine.kernels.triton.gluon import gl, jit

SPAN = tl.constexpr(128)
"""Columns of a tile of weights."""


@jit
def along(axis: tl.constexpr, size: tl.constexpr, layout: tl.constexpr):
    """Return 0 to size - 1 along one axis of three."""
    if axis == 0:
        line = gl.expand_dims(gl.arange(0, size, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1)
    elif axis == 1:
        line = gl.expand_dims(gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0)
    else:
        line = gl.expand_dims(gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0)
    return gl.expand_dims(line, 1 if axis == 2 else 2)


@jit
def tile_columns(
    fold,
    axis: tl.constexpr,
    layout: tl.constexpr,
    WARPS: tl.constexpr,
    FOLDS: tl.constexpr,
    EACH: tl.constexpr = 1,
):
    """Return the column numbers of a tile, by warp and by place along `axis`: the folds take turns, 32 columns each.

    Every place has EACH columns; the result is the number of the first.
    """
    place = along(axis, SPAN // EACH, layout)
    block = along(0, WARPS, layout) * SPAN + place // (32 // EACH) * 32
    return block * FOLDS + fold * 32 + place % (32 // EACH) * EACH


@jit
def load(at, column, inside, K: tl.constexpr, WHOLE: tl.constexpr):
    """Load the elements at + column, or 0 where column >= K (never with WHOLE) or `inside`, unless None, is False."""
    if WHOLE and inside is None:
        loaded = gl.load(at + column)
    elif WHOLE:
        loaded = gl.load(at + column, mask=inside, other=0.0)
    elif inside is None:
        loaded = gl.load(at + column, mask=column < K, other=0.0)
    else:
        loaded = gl.load(at + column, mask=inside & (column < K), other=0.0)
    return loaded
