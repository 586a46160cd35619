"""The product with quantised weights by torch's packed CPU operator: 4 bits a number, one scale and zero for 32.

What it computes with is scale * (digit - 8) + zero: the numbers of Q4_0, Q4_1 and Q4_K up to the rounding of scale and
zero to bf16. Those of Q8_0 and Q5_K are the sum of two such, one for the low four bits and one for what is above them:
they lie side by side, and the operator gets its input twice. Q6_K has a scale for 16 numbers: it is expanded to bf16.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from models.reference.layers import choose_product
from models.weights.block_formats import Kind
from models.weights.dequantize import affine
from models.weights.quantized import (
    TILE,
    QuantizedLinear,
    QuantizedTensor,
    TiledProduct,
    dequantize_rows,
    set_product,
)

FEW_ROWS = {"AVX2": 32, "AVX512": 64}
"""Up to how many rows of activations the operator is the faster product, by torch's instruction set: for more it pays
to expand the blocks, 100 ms for those of SmolLM2. Without vectors it never is."""

_PLANES = {Kind.Q4_0: 1, Kind.Q4_1: 1, Kind.Q4_K: 1, Kind.Q5_K: 2, Kind.Q8_0: 2}
_GROUP = 32
_ALIGNED = 64
"""Rows are packed by so many, or by a divisor of it: packed parts can be laid one below the other."""


class PackedProduct:
    """The packed operator for few rows, the plain product for many.

    What is packed belongs to this machine: its layout follows the instruction set.
    """

    def __init__(self, few: int) -> None:
        """Up to `few` rows are multiplied by the packed operator."""
        self._few = few
        self._plain = TiledProduct(torch.bfloat16)
        self._packed: dict[tuple[QuantizedTensor, ...], list[_Packed | _Expanded]] = {}

    def add(self, weights: Sequence[QuantizedTensor]) -> None:
        """Pack the weights of a layer, which it can be asked for from now on."""
        groups = groupby(weights, key=lambda weight: _PLANES.get(Kind(weight.qtype), 0))
        self._packed[tuple(weights)] = [
            _Packed(list(group), planes) if planes else _Expanded(list(group)) for planes, group in groups
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that are held besides the blocks."""
        return sum(part.nbytes for parts in self._packed.values() for part in parts)

    def __call__(self, x: Tensor, weights: Sequence[QuantizedTensor], bias: Tensor | None) -> Tensor:
        """See `QuantizedProduct`."""
        if not 0 < len(x) <= self._few:
            return self._plain(x, weights, bias)
        narrow = x.to(torch.bfloat16)
        outs = [part(narrow) for part in self._packed[tuple(weights)]]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return (out if bias is None else out + bias).to(x.dtype)


class _Packed:
    """Weights of as many planes of 4 bits each, one below the other."""

    def __init__(self, weights: Sequence[QuantizedTensor], planes: int) -> None:
        self._planes = planes
        self._rows = sum(weight.rows for weight in weights)
        columns = weights[0].columns
        padded = self._rows + -self._rows % _ALIGNED
        digits = torch.zeros(padded, planes * columns, dtype=torch.uint8)
        factors = torch.zeros(planes * columns // _GROUP, padded, 2, dtype=torch.bfloat16)
        row, step = 0, max(1, TILE // columns)
        for weight in weights:
            for data in torch.split(weight.data, step):
                _write_planes(data, Kind(weight.qtype), digits[row : row + len(data)], factors, row)
                row += len(data)
        step += -step % _ALIGNED
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._digits = torch.cat([pack(part.int(), 1) for part in torch.split(digits, step)])
        self._factors = factors

    @property
    def nbytes(self) -> int:
        return self._digits.nbytes + self._factors.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, self._planes) if self._planes > 1 else x.contiguous()
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        out: Tensor = multiply(wide, self._digits, _GROUP, self._factors)
        return out[:, : self._rows]


def _write_planes(data: Tensor, kind: Kind, digits: Tensor, factors: Tensor, row: int) -> None:
    """Write the digits of some rows of blocks, from 0 to 15, and from `row` on the (scale, zero) of their groups."""
    found, scale, low = affine(data, kind)
    columns, groups = found.shape[1], scale.shape[1]
    rows = slice(row, row + len(data))
    digits[:, :columns] = found & 15
    factors[:groups, rows, 0] = scale.T.bfloat16()
    factors[:groups, rows, 1] = (low + 8 * scale).T.bfloat16()
    if _PLANES[kind] > 1:
        digits[:, columns:] = (found >> 4) + 8
        factors[groups:, rows, 0] = (16 * scale).T.bfloat16()


class _Expanded:
    """Weights as numbers, one below the other."""

    def __init__(self, weights: Sequence[QuantizedTensor]) -> None:
        self._linear = choose_product(torch.bfloat16, torch.device("cpu"))
        rows = sum(weight.rows for weight in weights)
        self._numbers = torch.empty(rows, weights[0].columns, dtype=torch.bfloat16)
        row = 0
        for weight in weights:
            dequantize_rows(weight, 0, weight.rows, self._numbers[row : row + weight.rows])
            row += weight.rows

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._numbers, None)


def problem(dtype: torch.dtype) -> str | None:
    """Why activations of `dtype` cannot use the operator here, as the middle of a sentence; None if they can."""
    if dtype != torch.bfloat16:
        return (
            f"torch's packed operators round activations to bfloat16, not {str(dtype).removeprefix('torch.')}"
        )
    if torch.backends.cpu.get_cpu_capability() not in FEW_ROWS:
        return "torch's packed operators need AVX2"
    data = torch.arange(256, dtype=torch.uint8).repeat(5, 5)[:, :68].contiguous()
    data[:, 1::34] = 60  # scales from 1 to 2
    weight = QuantizedTensor(data, int(Kind.Q8_0), 5, 64)
    expected = torch.empty(5, 64)
    dequantize_rows(weight, 0, 5, expected)
    x = torch.eye(64, dtype=dtype)
    try:
        found = _Packed([weight], 2)(x).float()
    except (AttributeError, RuntimeError):
        return "this torch has no packed operators"
    if not torch.allclose(found, expected.T, rtol=0.02, atol=0.02):
        return "torch's packed operators give wrong results here"
    return None


def faster_than_expanded() -> bool:
    """Whether the operator decodes faster than weights expanded to bf16 do.

    With AVX-512 a core computes the products for a token of SmolLM2 in 8.5 ms against 14, with AVX2 in 21.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def use_packed(model: nn.Module) -> PackedProduct:
    """Have the quantised layers of a model, whose dtype must have no `problem`, compute with packed weights."""
    product = PackedProduct(FEW_ROWS[torch.backends.cpu.get_cpu_capability()])
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # waiting for each other after every small operation takes longer than all of them
    try:
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                product.add(module.weights)
    finally:
        torch.set_num_threads(threads)
    set_product(model, product)
    return product
