"""What a product with packed weights reads of its input, and of the norm before it (see `packed_linear.py`).

A warp reads the columns of its tiles in parts: RUN groups, each in a lane of its own (`lanes.py`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
import triton.language as tl

from engine.kernels.triton.columns import along, load
from engine.kernels.triton.gluon import gl, jit, paired
from engine.kernels.triton.lanes import combine_row
from engine.kernels.triton.packed import COLUMNS, matrix_choice


@jit
def _columns(
    part: tl.constexpr, L: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr
):
    """Return the column numbers of a part of each warp's tiles in the first span: RUN groups, one in each lane."""
    at = along(0, WARPS, L) * COLUMNS + part * (RUN * GROUP) + along(1, GROUP, L)
    if RUN > 1:
        at += along(2, 8, L) % RUN * GROUP
    return at


@jit
def _load(source, at, step, given, order, K: tl.constexpr, CHOSEN: tl.constexpr, WHOLE: tl.constexpr):
    """Load the elements at + step of `source`, in `order`; 0 for K * CHOSEN and beyond, or where `given` is False."""
    if order is not None:
        at, step = gl.load(order + (at + step), mask=at + step < K, other=K), 0
        loaded = load(source, at, given, K, WHOLE)
    elif WHOLE:  # what is the same in every span comes first, so that it is computed once
        loaded = load(source + at, step, given, K, WHOLE)
    else:
        inside = at + step < K * CHOSEN
        loaded = gl.load(source + at + step, mask=inside if given is None else inside & given, other=0.0)
    return loaded


@jit
def _load_rows(
    rows, i, part: tl.constexpr, given, attended, order, K: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr,
    ACROSS: tl.constexpr, CHOSEN: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr, X: tl.constexpr,
    ATTENDED: tl.constexpr,
):  # fmt: skip
    """Load the inputs of a part of span i, `paired`: K numbers for each of the matrices side by side."""
    at, step = _columns(part, X, WARPS, GROUP, RUN), i * (WARPS * COLUMNS)
    if ATTENDED is not None:
        loaded = combine_row(attended, rows.dtype.element_ty, i, part, K, WARPS, GROUP, RUN, X, ATTENDED)
    elif CHOSEN == 1 or ACROSS * COLUMNS == K:
        loaded = paired(_load(rows, at, step, given, order, K, CHOSEN, WHOLE))
    else:
        choice = matrix_choice(i, X, WARPS, ACROSS)
        at += step - choice * (ACROSS * COLUMNS)
        inside = (at < K) & (choice < CHOSEN)
        loaded = paired(
            gl.load(rows + (choice * K + at), mask=inside if given is None else inside & given, other=0.0)
        )
    return loaded


@jit
def load_norm(
    norm_weight, i, part: tl.constexpr, order, K: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, RUN: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Load the norm's weights of a part of span i, `paired`."""
    at = _columns(part, X, WARPS, GROUP, RUN)
    return paired(_load(norm_weight, at, i * (WARPS * COLUMNS), None, order, K, 1, WHOLE))


@jit
def load_inputs(
    i, rows, given, attended, norm_weight, order, K: tl.constexpr, NORM: tl.constexpr, WARPS: tl.constexpr,
    GROUP: tl.constexpr, ACROSS: tl.constexpr, CHOSEN: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    X: tl.constexpr, ATTENDED: tl.constexpr,
):  # fmt: skip
    """Load the inputs of span i: the rows of each part, and the norm's weights that belong to them."""
    found, scales = (), ()
    for part in tl.static_range(COLUMNS // GROUP // RUN):
        found += (
            _load_rows(
                rows, i, part, given, attended, order, K, WARPS, GROUP, ACROSS, CHOSEN, WHOLE, RUN, X, ATTENDED
            ),
        )  # fmt: skip
        if NORM:
            scales += (load_norm(norm_weight, i, part, order, K, WARPS, GROUP, WHOLE, RUN, X),)
    return found, scales
