"""Weights that stay quantised, in the block formats of GGUF: how they lie in memory, and the plain product with them,
which dequantises some rows at a time.

How a weight lies in memory
---------------------------
A weight [rows, columns] is one `Weight` (models/network.py): `rows` output features, `columns` input features, every
row a whole number of blocks. `data` is uint8 [rows, row_bytes], contiguous: row r begins at `data.data_ptr() + r *
row_bytes`, and its blocks follow each other without a gap. `format` is the type's number in GGUF files.
Little-endian; f16 is an IEEE half; nibbles are written low first, so byte j of a 32-block holds number j (low) and
number j + 16 (high).

   format  name  numbers  bytes  a block is
        2  Q4_0       32     18  f16 d, u8 qs[16]                        d * (q - 8)
        3  Q4_1       32     20  f16 d, f16 m, u8 qs[16]                 d * q + m
        8  Q8_0       32     34  f16 d, i8 qs[32]                        d * q
       12  Q4_K      256    144  f16 d, f16 dmin, u8 scales[12], u8 qs[128]
       13  Q5_K      256    176  f16 d, f16 dmin, u8 scales[12], u8 qh[32], u8 qs[128]
       14  Q6_K      256    210  u8 ql[128], u8 qh[64], i8 scales[16], f16 d

No other type reaches a layer: what a file holds in another one becomes Q8_0 at load. Promises and limits:

- The memory may be a read-only mapping of the model file: never write to it. It lives as long as the tensor does.
- Any address is possible. Files align a tensor to 32 bytes as a rule, but blocks of 18, 20, 34 and 210 bytes leave
  their fields at any even address, and a file may ask for another alignment: load without assuming one.
- Nothing may be read past `data[rows - 1]`: it can be the last byte of the mapping.
- The blocks are those of the file. Scales may be zero, negative, denormal, and in a damaged file infinite or NaN.
- Rows lie in the order in which the layer yields its outputs: the q and k rows of a Llama file, which interleaves the
  two halves of every head, are put in order at load (those are copies, all else is a view of the mapping).
- `columns` is a multiple of the block. `rows` is any positive number.

The parts of a packed layer (q, k, v; gate, up) lie in packing order, each with a type of its own; its bias is one
vector over all of them, in the dtype of the activations, or None. Where the embedding is tied, the head's one part is
the embedding itself. Norms are plain, as everywhere. A network is quantised as a whole or not at all
(`Network.is_quantized`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.network import Weight
from models.reference.products import choose_product, compute_dtype
from models.weights.block_formats import BLOCKS, Kind
from models.weights.dequantize import dequantize

KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
"""The types that a layer can hold."""

TILE = 1 << 20
"""Numbers that are dequantised at once: 4 MB in fp32. Fewer cost torch more in waiting between its small operations,
and the product more in reading its input again."""


def row_bytes(kind: int, columns: int) -> int:
    """Bytes of a row of `columns` numbers, a multiple of the block."""
    block, block_bytes = BLOCKS[Kind(kind)]
    assert columns % block == 0
    return int(columns // block * block_bytes)


def dequantize_rows(weight: Weight, start: int, stop: int, out: Tensor) -> None:
    """Write the rows from `start` to `stop` as numbers to `out` [stop - start, columns], contiguous, fp32 or bf16."""
    dequantize(weight.data[start:stop], weight.format, out)


def embed(weight: Weight, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of an embedding, plain or in blocks: int64 [T] -> [T, columns] of `dtype`."""
    rows = weight.data.index_select(0, token_ids)
    if weight.is_plain:
        return rows
    out = torch.empty(len(token_ids), weight.columns, dtype=dtype)
    dequantize(rows, weight.format, out)
    return out


Dequantize = Callable[[Weight, int, int, Tensor], None]
"""See `dequantize_rows`."""


class TiledProduct:
    """The plain product: `tile` weights at a time become numbers, in one buffer for all layers that share it."""

    def __init__(
        self, dtype: torch.dtype, tile: int = TILE, dequantize: Dequantize = dequantize_rows
    ) -> None:
        """`dtype` is that of the activations; `dequantize` does what `dequantize_rows` does, perhaps faster."""
        self.dtype = compute_dtype(dtype)
        """What tiles and products are computed in: fp32, or bf16 where the machine multiplies it faster."""
        self._dequantize = dequantize
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
                self._dequantize(weight, low - first, high - first, tile[low - start : high - start])
            first += weight.rows
        return tile
