"""torch's packed operator against the numbers of the blocks."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.weights import packed
from models.weights.block_formats import BLOCKS, Kind
from models.weights.dequantize import affine
from models.weights.packed import PackedProduct, problem
from models.weights.quantize import quantize
from models.weights.quantized import KINDS, QuantizedTensor, dequantize_rows
from tests.models.checkpoints import random_blocks

BF16 = torch.bfloat16
FEW = 8
TOLERANCE = 0.01
"""Of the root of the sum of the squared terms of an output, which is what rounding is relative to where they cancel:
scale and zero, or the numbers, and what comes out are rounded to 8 bits, 0.2% each at most."""


@pytest.fixture(autouse=True)
def _operator() -> None:
    if (reason := problem(BF16)) is not None:
        pytest.skip(reason)


def random_weight(kind: Kind, rows: int, columns: int) -> QuantizedTensor:
    """Blocks of normal weights where the type can be written, else random ones."""
    if kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        data = quantize(values, kind)
    else:
        data = torch.from_numpy(random_blocks(kind, rows, columns))
    return QuantizedTensor(data, int(kind), rows, columns)


def numbers(weight: QuantizedTensor) -> Tensor:
    out = torch.empty(weight.rows, weight.columns)
    dequantize_rows(weight, 0, weight.rows, out)
    return out


def check(weights: Sequence[QuantizedTensor], rows: int, bias: Tensor | None = None) -> None:
    product = PackedProduct(FEW)
    product.add(weights)
    x = torch.randn(rows, weights[0].columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = None if bias is None else bias.float()
    matrix = torch.cat([numbers(weight) for weight in weights])
    expected = F.linear(x.float(), matrix, wide)
    terms = F.linear(x.float().square(), matrix.square()).sqrt()
    found = product(x, weights, bias)
    assert (found.dtype, found.shape) == (BF16, expected.shape)
    assert (found.float() - expected).norm() <= TOLERANCE * torch.maximum(terms, expected.abs()).norm()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != Kind.Q6_K])
def test_digits_scales_and_lows_are_the_numbers(kind: Kind) -> None:
    weight = random_weight(kind, 7, 512)
    digits, scale, low = affine(weight.data, kind)
    found = digits.view(7, -1, 32) * scale.unsqueeze(-1) + low.unsqueeze(-1)
    torch.testing.assert_close(found.view(7, -1), numbers(weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 37, 64, 130])
@pytest.mark.parametrize("tokens", [0, 1, 3, FEW, FEW + 1])
def test_the_product_is_that_of_the_numbers(kind: Kind, rows: int, tokens: int) -> None:
    block = BLOCKS[kind][0]
    for columns in (block, 3 * block):
        check([random_weight(kind, rows, columns)], tokens)


def test_weights_of_several_types_lie_side_by_side() -> None:
    weights = [random_weight(kind, 30 + index, 512) for index, kind in enumerate(KINDS)]
    check(weights, 2, torch.ones(sum(weight.rows for weight in weights), dtype=BF16))


def test_what_is_packed_in_steps_is_what_is_packed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "TILE", 64 * 50)  # 50 rows of blocks, 64 and 128 of digits
    check([random_weight(Kind.Q8_0, 333, 64), random_weight(Kind.Q8_0, 70, 64)], 2)


def test_four_bits_take_five() -> None:
    product = PackedProduct(FEW)
    product.add([random_weight(Kind.Q4_1, 128, 256)])
    assert product.nbytes == 128 * 256 * 5 / 8


def test_an_operator_that_is_missing_or_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "round activations" in (problem(torch.float32) or "")
    with monkeypatch.context() as patch:
        patch.setattr(packed._Packed, "__call__", lambda self, x: torch.zeros(len(x), 5))
        assert "wrong results" in (problem(BF16) or "")
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "aten", object())
        assert "no packed operators" in (problem(BF16) or "")
    with monkeypatch.context() as patch:
        patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
        assert "AVX2" in (problem(BF16) or "")
