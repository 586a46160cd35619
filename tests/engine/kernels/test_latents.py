"""Latent attention in the kernels of a decode step against plain torch, in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.step_products import StepProducts
from engine.kernels.triton.linear import HeadInputs
from models.network import Linear, Weight
from models.weights.block_formats import Kind
from tests.engine.kernels.test_packed import packed

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)


@pytest.mark.parametrize("kind", [None, Kind.Q4_0, Kind.Q8_0, Kind.Q6_K])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_each_head_has_a_product_of_its_own_columns(kind: Kind | None, count: int) -> None:
    heads, outputs, inputs, size = 3, 48, 256 if kind is Kind.Q6_K else 192, 272
    generator = torch.Generator().manual_seed(count)
    if kind is None:
        numbers = torch.randn(heads * outputs, inputs, generator=generator)
        weight = Weight.plain(numbers)
    else:
        planes, numbers = packed(kind, heads * outputs, inputs, 3)
        weight = Weight.packed(planes)
    x = torch.randn(count, heads, size, generator=generator)
    out = torch.full((count + 1, heads * outputs), 7.0)
    network: Any = SimpleNamespace(
        spec=SimpleNamespace(hidden_size=64, layers=()), dtype=torch.float32, device=CPU, layer_inputs=None
    )
    products = StepProducts(network, 16, False, KernelConfigs(), None)
    products.run(count, x, Linear((weight,)), out[:count], heads=HeadInputs(outputs, size, heads * size))
    wanted = torch.einsum("thk,hnk->thn", x[..., :inputs], numbers.view(heads, outputs, inputs))
    torch.testing.assert_close(out[:count], wanted.flatten(1), rtol=1e-3, atol=1e-2)
    assert (out[count:] == 7.0).all()
