"""The plain product with quantised weights, which dequantises some rows at a time. See weights/quantized.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.network import Weight
from models.reference.products import choose_product, compute_dtype
from models.weights.dequantize import dequantize

TILE = 1 << 20
"""Numbers that are dequantised at once: 4 MB in fp32. Fewer cost torch more in waiting between its small operations,
and the product more in reading its input again."""


def embed(weight: Weight, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of an embedding, plain or in blocks: int64 [T] -> [T, columns] of `dtype`."""
    rows = weight.data.index_select(0, token_ids)
    if weight.is_plain:
        return rows
    out = torch.empty(len(token_ids), weight.columns, dtype=dtype)
    dequantize(rows, weight.format, out)
    return out


class TiledProduct:
    """The plain product: `tile` weights at a time become numbers, in one buffer for all layers that share it."""

    def __init__(self, dtype: torch.dtype, tile: int = TILE) -> None:
        """`dtype` is that of the activations."""
        self.dtype = compute_dtype(dtype)
        """What tiles and products are computed in: fp32, or bf16 where the machine multiplies it faster."""
        self._product = choose_product(self.dtype, torch.device("cpu"))
        self._tile = tile
        self._buffer = torch.empty(0, dtype=self.dtype)

    def __call__(self, x: Tensor, weights: Sequence[Weight], bias: Tensor | None) -> Tensor:
        """x [T, columns] of any float dtype, weights with as many columns, bias [sum of the rows] or None ->
        [T, sum of the rows] in the dtype of x: the outputs of the weights side by side.
        """
        wide = x.to(self.dtype)
        columns, rows = weights[0].columns, sum(weight.rows for weight in weights)
        step = max(1, self._tile // columns)
        if rows <= step:
            out = self._product(wide, self._numbers(weights, 0, rows), None)
        else:
            out = wide.new_empty(len(x), rows)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                out[:, start:stop] = self._product(wide, self._numbers(weights, start, stop), None)
        if bias is not None:
            out += bias
        return out.to(x.dtype)

    def _numbers(self, weights: Sequence[Weight], start: int, stop: int) -> Tensor:
        """The rows from `start` to `stop` of the weights one below the other; the next call overwrites them."""
        size = (stop - start) * weights[0].columns
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype)
        tile = self._buffer[:size].view(stop - start, -1)
        first = 0  # row of all weights at which this one begins
        for weight in weights:
            low, high = max(start, first), min(stop, first + weight.rows)
            if low < high:
                data = weight.data[low - first : high - first]
                dequantize(data, weight.format, tile[low - start : high - start])
            first += weight.rows
        return tile
