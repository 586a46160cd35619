"""Weights that stay quantised, in the block formats of GGUF: how they lie in memory, the layers that hold them, and
the plain product with them, which dequantises some rows at a time.

How a weight lies in memory
---------------------------
A weight [rows, columns] is one `QuantizedTensor`: `rows` output features, `columns` input features, every row a whole
number of blocks. `data` is uint8 [rows, row_bytes], contiguous: row r begins at `data.data_ptr() + r * row_bytes`, and
its blocks follow each other without a gap. `qtype` is the type's number in GGUF files. Little-endian; f16 is an IEEE
half; nibbles are written low first, so byte j of a 32-block holds number j (low) and number j + 16 (high).

    qtype  name  numbers  bytes  a block is
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

`QuantizedLinear.weights` holds the parts of a packed layer in packing order (q, k, v; gate, up), each with a type of
its own; `bias` is one parameter over all of them, in the dtype of the model, or None. `QuantizedEmbedding.weight` is
one tensor; where the embedding is tied, `lm_head.weights[0]` is the same object. Norms are parameters in the dtype of
the model, as everywhere. A model is quantised as a whole or not at all: `isinstance(model.lm_head, QuantizedLinear)`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from models.reference.decoder import DecoderModel
from models.reference.layers import Embedding, Linear, Slot, choose_product, compute_dtype
from models.weights.block_formats import BLOCKS, Kind
from models.weights.dequantize import dequantize

KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
"""The types that a layer can hold."""

TILE = 1 << 20
"""Numbers that are dequantised at once: 4 MB in fp32. Fewer cost torch more in waiting between its small operations,
and the product more in reading its input again."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A weight [rows, columns] in blocks; see above for how they lie."""

    data: Tensor
    """uint8 [rows, row_bytes], contiguous; perhaps memory that must not be written. On the meta device until
    models.load fills it."""
    qtype: int
    """The number of the type in GGUF files: one of KINDS."""
    rows: int
    columns: int

    def __post_init__(self) -> None:
        assert self.qtype in KINDS
        assert self.data.dtype == torch.uint8
        assert self.data.is_contiguous()
        assert self.data.shape == (self.rows, row_bytes(self.qtype, self.columns))

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.nbytes

    @classmethod
    def empty(cls, kind: int, rows: int, columns: int) -> "QuantizedTensor":
        """One without memory, on the meta device."""
        data = torch.empty(rows, row_bytes(kind, columns), dtype=torch.uint8, device="meta")
        return cls(data, int(kind), rows, columns)


def row_bytes(kind: int, columns: int) -> int:
    """Bytes of a row of `columns` numbers, a multiple of the block."""
    block, block_bytes = BLOCKS[Kind(kind)]
    assert columns % block == 0
    return int(columns // block * block_bytes)


def dequantize_rows(weight: QuantizedTensor, start: int, stop: int, out: Tensor) -> None:
    """Write the rows from `start` to `stop` as numbers to `out` [stop - start, columns], contiguous, fp32 or bf16."""
    dequantize(weight.data[start:stop], Kind(weight.qtype), out)


Dequantize = Callable[[QuantizedTensor, int, int, Tensor], None]
"""See `dequantize_rows`."""


class QuantizedProduct(Protocol):
    """What a packed layer computes."""

    def __call__(self, x: Tensor, weights: Sequence[QuantizedTensor], bias: Tensor | None) -> Tensor:
        """x [T, columns] of any float dtype, weights with as many columns, bias [sum of the rows] or None ->
        [T, sum of the rows] in the dtype of x: the outputs of the weights side by side.
        """
        ...


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

    def __call__(self, x: Tensor, weights: Sequence[QuantizedTensor], bias: Tensor | None) -> Tensor:
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

    def _numbers(self, weights: Sequence[QuantizedTensor], start: int, stop: int) -> Tensor:
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


class QuantizedLinear(nn.Module):
    """One or several linear layers over the same input, each with a weight of its own, side by side in the output."""

    weights: list[QuantizedTensor]
    """One a part, in packing order."""
    bias: nn.Parameter | None

    def __init__(self, plain: Linear, kinds: Sequence[int], product: QuantizedProduct) -> None:
        """In the place of `plain`, an unfilled one; `kinds` has a type for every part."""
        super().__init__()
        self.parts = dict(plain.parts)
        self.product = product
        self.in_features = plain.weight.shape[1]
        self.weights = [
            QuantizedTensor.empty(kind, rows, self.in_features)
            for kind, rows in zip(kinds, self.parts.values(), strict=True)
        ]
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the parts]"""
        return self.product(x, self.weights, self.bias)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """As in Linear; the parameter is "weights", and `start` is the index in it."""
        start = 0
        for index, (name, rows) in enumerate(self.parts.items()):
            yield f"{name}.weight", Slot("weights", index, rows, (rows, self.in_features))
            if self.bias is not None:
                yield f"{name}.bias", Slot("bias", start, rows, (rows,))
            start += rows


class QuantizedEmbedding(nn.Module):
    """One row of `weight` a token."""

    weights: list[QuantizedTensor]
    """Exactly one."""

    def __init__(self, plain: Embedding, kind: int, dtype: torch.dtype) -> None:
        """In the place of `plain`, an unfilled one; `dtype` is that of the rows it gives."""
        super().__init__()
        self.dtype = dtype
        self.weights = [QuantizedTensor.empty(kind, *plain.weight.shape)]

    @property
    def weight(self) -> QuantizedTensor:
        return self.weights[0]

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]"""
        weight = self.weight
        out = torch.empty(len(token_ids), weight.columns, dtype=self.dtype)
        dequantize(weight.data.index_select(0, token_ids), Kind(weight.qtype), out)
        return out

    def slots(self) -> Iterator[tuple[str, Slot]]:
        rows, columns = self.weight.rows, self.weight.columns
        yield "embed_tokens.weight", Slot("weights", 0, rows, (rows, columns))


def hold_quantized(model: DecoderModel, kinds: Mapping[str, int], dtype: torch.dtype) -> None:
    """Put quantised layers in the place of the plain ones of an unfilled model; they share one TiledProduct.

    `kinds` has the type of every matrix by its checkpoint name; `dtype` is that of the activations.
    """
    found: dict[nn.Module, list[int]] = {}
    for name, module, slot in model.slots():
        if slot.parameter == "weight" and isinstance(module, Linear | Embedding):
            found.setdefault(module, []).append(kinds[name])
    embedding = QuantizedEmbedding(model.embed_tokens, found[model.embed_tokens][0], dtype)
    product = TiledProduct(dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Embedding):
                setattr(parent, name, embedding)
            elif isinstance(child, Linear):
                setattr(
                    parent, name, QuantizedLinear(child, found.get(child, [embedding.weight.qtype]), product)
                )
    if model.config.tie_word_embeddings:
        cast(QuantizedLinear, model.lm_head).weights = embedding.weights


def set_product(model: nn.Module, product: QuantizedProduct) -> None:
    """Have all quantised layers of a model compute their outputs with `product`."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.product = product


def quantized_weights(model: nn.Module) -> list[QuantizedTensor]:
    """The quantised weights of a model, each once, in the order of its modules; empty where it has none."""
    modules = [m for m in model.modules() if isinstance(m, QuantizedEmbedding | QuantizedLinear)]
    return list({id(weight): weight for module in modules for weight in module.weights}.values())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, plain and quantised, each once."""
    plain = sum(parameter.nbytes for parameter in model.parameters())
    return plain + sum(weight.nbytes for weight in quantized_weights(model))


def release(model: nn.Module) -> None:
    """Let go of the memory of all quantised weights: they are on the meta device again."""
    for module in model.modules():
        if isinstance(module, QuantizedEmbedding | QuantizedLinear):
            module.weights[:] = [QuantizedTensor.empty(w.qtype, w.rows, w.columns) for w in module.weights]
