"""Uses of weights in planes on a GPU: products of many rows, embeddings, and the kernel arguments that describe planes.

The plain twins are in `models/reference/tiled.py`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.kernels.triton.unpack import Codes, packed_rows_kernel, unpack_kernel
from models.network import Weight
from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS, COLUMNS
from models.weights.packing import tiles

SCRATCH = 1 << 26
"""Numbers of a matrix to expand at once: 128 MB in bf16. They are multiplied before the next ones are expanded."""
_HEIGHT = 32
"""Rows that a program unpacks, of one tile of columns."""


@cache
def codes_of(kind: Kind) -> Codes:
    """Return the constants that describe the planes of a type to kernels."""
    planes = BLOCKS[kind]
    bits, *more = planes.planes
    scaled = planes.group, planes.shared, planes.values, planes.supers
    return Codes(bits, sum(more), planes.offset, *scaled, planes.floats)


def plane_args(weight: Weight) -> dict[str, Any]:
    """Return the planes and their properties as kernel arguments (see `packed_linear_kernel`)."""
    planes = weight.planes
    assert planes is not None
    return {
        "codes": planes.codes[0],
        "more": planes.codes[-1],
        "scales": planes.scales,
        "supers": planes.scales if planes.supers is None else planes.supers,
        "CODES": codes_of(weight.format),
    }


def matrix_args(weight: Weight) -> dict[str, Any]:
    """Return arguments for kernels that also accept plain weights: `weight` is the codes or the plain numbers."""
    if weight.planes is None:
        return {"weight": weight.data}
    planes = plane_args(weight)
    return {"weight": planes.pop("codes"), **planes}


def ordered_plane_args(weight: Weight) -> dict[str, Any]:
    """Return the arguments of `plane_args`, and the order of the columns if they are reordered."""
    assert weight.planes is not None
    order = weight.planes.order
    return plane_args(weight) if order is None else {**plane_args(weight), "order": order}


def packed_product(x: Tensor, weights: Sequence[Weight], bias: Tensor | None) -> Tensor:
    """Multiply x [T, columns] by weights in planes; bias [sum of rows] or None -> [T, sum of rows].

    A part of a matrix at a time is expanded to the dtype of x, in memory that the next part may reuse.
    """
    total = sum(weight.rows for weight in weights)
    step = max(1, SCRATCH // weights[0].columns)
    if len(weights) == 1 and total <= step:
        return F.linear(_in_order(x, weights[0]), _expanded(weights[0], 0, total, x.dtype), bias)
    out = torch.empty(len(x), total, dtype=x.dtype, device=x.device)
    first = 0
    for weight in weights:
        given = _in_order(x, weight)
        for start in range(0, weight.rows, step):
            rows = min(step, weight.rows - start)
            target = out[:, first + start : first + start + rows]
            torch.mm(given, _expanded(weight, start, rows, x.dtype).t(), out=target)
        first += weight.rows
    return out if bias is None else out.add_(bias)


def packed_embedding(weight: Weight, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up embeddings as `models.reference.tiled.embed` does."""
    if weight.planes is None:
        return weight.data.index_select(0, token_ids)
    out = torch.empty(len(token_ids), weight.columns, dtype=dtype, device=token_ids.device)
    count, columns = out.shape
    packed_rows_kernel[(tiles(columns, COLUMNS), triton.cdiv(count, _HEIGHT))](
        token_ids, out=out, count=count, K=columns, **plane_args(weight), HEIGHT=_HEIGHT, num_warps=4
    )
    return out


def _in_order(x: Tensor, weight: Weight) -> Tensor:
    """Return x with its columns in the order of the planes."""
    assert weight.planes is not None
    order = weight.planes.order
    return x if order is None else x.index_select(1, order)


def _expanded(weight: Weight, start: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Expand `rows` rows from `start` on: [rows, columns], with columns in the order of the planes."""
    out = torch.empty(rows, weight.columns, dtype=dtype, device=weight.data.device)
    unpack_kernel[(tiles(weight.columns, COLUMNS), triton.cdiv(rows, _HEIGHT))](
        out=out,
        start=start,
        N=rows,
        K=weight.columns,
        **plane_args(weight),
        HEIGHT=_HEIGHT,
        num_warps=4,
    )
    return out
