"""The reference product with quantised weights (see weights/quantized.py): it dequantises some rows at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.network import Weight
from models.reference.products import choose_product, compute_dtype
from models.weights.formats.blocks import dequantize
from models.weights.packing import unpack

TILE = 1 << 20
"""How many numbers are dequantised at once: 4 MB in fp32. With fewer, torch loses more time waiting between its small
operations, and the product reads its input more often."""

UNPACKED = 64
"""How many rows of an embedding in planes are unpacked at once."""


def embed(weight: Weight, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up rows of an embedding in any format: int64 [T] -> [T, columns] in `dtype`."""
    if weight.planes is not None:
        found = torch.empty(len(token_ids), weight.columns, dtype=dtype, device=token_ids.device)
        for start in range(0, len(token_ids), UNPACKED):
            part = slice(start, start + UNPACKED)
            found[part] = unpack(weight.planes, token_ids[part])
        return found
    rows = weight.data.index_select(0, token_ids)
    if weight.is_plain:
        return rows
    out = torch.empty(len(token_ids), weight.columns, dtype=dtype)
    dequantize(rows, weight.format, out)
    return out


class TiledProduct:
    """The reference product: it dequantises `tile` weights at a time into one buffer that all layers share."""

    def __init__(self, dtype: torch.dtype, tile: int = TILE, device: torch.device | None = None) -> None:
        """Multiply activations of `dtype` on `device` (None: the CPU), which has the weights, too."""
        self._device = device or torch.device("cpu")
        self.dtype = compute_dtype(dtype) if self._device.type == "cpu" else dtype
        """The dtype of tiles and products: on a CPU fp32, or bf16 if the machine multiplies it faster; else `dtype`."""
        self._product = choose_product(self.dtype, self._device)
        self._tile = tile
        self._buffer = torch.empty(0, dtype=self.dtype, device=self._device)

    def __call__(self, x: Tensor, weights: Sequence[Weight], bias: Tensor | None) -> Tensor:
        """Multiply x [T, columns] of any float dtype by weights with as many columns; add bias [rows of all weights] or
        None: -> [T, rows of all weights] in the dtype of x, the outputs of the weights side by side.
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
        """Return the rows from `start` to `stop` of the weights stacked; the next call overwrites them."""
        size = (stop - start) * weights[0].columns
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype, device=self._device)
        tile = self._buffer[:size].view(stop - start, -1)
        first = 0  # the row at which this weight begins among all rows
        for weight in weights:
            low, high = max(start, first), min(stop, first + weight.rows)
            if low < high:
                target = tile[low - start : high - start]
                if weight.planes is not None:
                    rows = torch.arange(low - first, high - first, device=self._device)
                    target.copy_(unpack(weight.planes, rows))
                else:
                    dequantize(weight.data[low - first : high - first], weight.format, target)
            first += weight.rows
        return tile
