"""What reads weights in planes on a GPU: products of many rows, and embeddings; and what kernels are told of planes.

The plain twins are in `models/reference/tiled.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.kernels.triton.unpack import packed_rows_kernel, unpack_kernel
from models.network import Weight
from models.weights.packing import COLUMNS, PACKINGS, tiles

SCRATCH = 1 << 26
"""Numbers of a matrix that are expanded at once: 128 MB in bf16. It is multiplied before the next ones are."""
_HEIGHT = 32
"""Rows that a program unpacks, of one tile of columns."""


def planes_of(weight: Weight) -> dict[str, Any]:
    """The planes, and what they are, as arguments of kernels (see `packed_linear_kernel`)."""
    planes, packing = weight.planes, PACKINGS[weight.format]
    assert planes is not None
    return {
        "codes": planes.codes[0],
        "more": planes.codes[-1],
        "scales": planes.scales,
        "supers": planes.scales if planes.supers is None else planes.supers,
        "BITS": packing.planes[0],
        "MORE": packing.planes[1] if len(packing.planes) > 1 else 0,
        "LESS": packing.offset,
        "GROUP": packing.group,
        "VALUES": packing.values,
        "SUPERS": packing.supers,
        "FLOATS": packing.floats,
        **({"SHARED": packing.shared} if packing.shared > 1 else {}),
    }


def matrices_of(weight: Weight) -> dict[str, Any]:
    """The same for kernels that multiply plain numbers, too: codes stand in their place."""
    if weight.planes is None:
        return {"weight": weight.data}
    planes = planes_of(weight)
    return {"weight": planes.pop("codes"), **planes}


def ordered_planes_of(weight: Weight) -> dict[str, Any]:
    """The same, and in which order the columns lie."""
    assert weight.planes is not None
    order = weight.planes.order
    return planes_of(weight) if order is None else {**planes_of(weight), "order": order}


def packed_product(x: Tensor, weights: Sequence[Weight], bias: Tensor | None) -> Tensor:
    """x [T, columns], weights in planes with as many, bias [sum of the rows] or None -> [T, sum of the rows].

    A part of a matrix at a time becomes numbers of the dtype of x, in a buffer that the next part may have.
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
    """As `models.reference.tiled.embed`."""
    if weight.planes is None:
        return weight.data.index_select(0, token_ids)
    out = torch.empty(len(token_ids), weight.columns, dtype=dtype, device=token_ids.device)
    packed_rows_kernel[(triton.cdiv(weight.columns, 1024), len(token_ids))](
        token_ids, out=out, K=weight.columns, **planes_of(weight), BLOCK=1024, num_warps=4
    )
    return out


def _in_order(x: Tensor, weight: Weight) -> Tensor:
    """The columns as they lie in the planes."""
    assert weight.planes is not None
    order = weight.planes.order
    return x if order is None else x.index_select(1, order)


def _expanded(weight: Weight, start: int, rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns]: those from `start` on, columns as they lie in the planes."""
    out = torch.empty(rows, weight.columns, dtype=dtype, device=weight.data.device)
    unpack_kernel[(tiles(weight.columns, COLUMNS), triton.cdiv(rows, _HEIGHT))](
        out=out,
        start=start,
        N=rows,
        K=weight.columns,
        **planes_of(weight),
        HEIGHT=_HEIGHT,
        num_warps=4,
    )
    return out
