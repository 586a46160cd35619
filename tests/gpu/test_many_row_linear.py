"""Products of decode steps of many rows, with the tiles that are chosen for larger networks, against plain ones."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gated", "apart", "groups"),
    [
        (32, 12_288, 4096, True, False, False),
        (27, 6144, 4096, True, False, False),
        (32, 4096, 6144, False, True, False),
        (32, 2560, 9728, False, True, False),
        (64, 4096, 12_288, False, True, False),
        (50, 2048, 6144, False, True, False),
        (9, 8192, 2048, True, False, True),
        (27, 3072, 4096, False, False, True),
        (64, 6144, 4096, True, False, True),
        (50, 9728, 2560, True, False, True),
        (16, 4096, 12_288, False, True, True),
        (32, 1024, 3072, False, True, True),
        (100, 2560, 9728, False, True, True),
    ],
)
def test_the_tiles_of_larger_networks(
    rows: int, outputs: int, inputs: int, gated: bool, apart: bool, groups: bool
) -> None:
    from engine.execute.cuda.kernel_configs import KernelConfigs
    from engine.execute.cuda.many_row_linear import warpgroup_product, wide_product
    from engine.execute.cuda.tiles import rounded
    from engine.kernels.triton.launch import has_warpgroups
    from models.network import Linear, Weight
    from models.spec import FeedForward

    if groups and not has_warpgroups(torch.device("cuda", 0)):
        pytest.skip("needs sm_90")
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, inputs, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(outputs * (2 if gated else 1), inputs, device="cuda", generator=generator).bfloat16()
    weight *= inputs**-0.5
    if groups:
        tile, multiply = KernelConfigs().warpgroups(rows, outputs, inputs, gated, apart), warpgroup_product
    else:
        tile, multiply = KernelConfigs().wide(rounded(rows), outputs, inputs, gated, apart), wide_product
    assert tile is not None
    gate = FeedForward(outputs) if gated else None
    found = multiply(Linear((Weight.plain(weight),)), x, gate, tile, PDL).float()
    wanted = F.linear(x.float(), weight.float())
    if gated:
        wanted = F.silu(wanted[:, :outputs]) * wanted[:, outputs:]
    if tile.split > 1:
        assert found.shape == (tile.split, rows, outputs)
        found = found.sum(0)
    error = (found - wanted).norm() / wanted.norm()
    assert error < (2e-3 if tile.split == 1 else 1e-5)
