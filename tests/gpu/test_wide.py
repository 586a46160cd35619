"""Products of decode steps of many rows, with the tiles that are chosen for larger networks, against plain ones."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gated", "apart"),
    [
        (32, 12_288, 4096, True, False),
        (27, 6144, 4096, True, False),
        (32, 4096, 6144, False, True),
        (32, 2560, 9728, False, True),
        (64, 4096, 12_288, False, True),
        (50, 2048, 6144, False, True),
    ],
)
def test_the_tiles_of_larger_networks(rows: int, outputs: int, inputs: int, gated: bool, apart: bool) -> None:
    from engine.execute.cuda.tiles import choose_wide_tile
    from engine.execute.cuda.wide import wide_product
    from models.network import Linear, Weight
    from models.spec import FeedForward

    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, inputs, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(outputs * (2 if gated else 1), inputs, device="cuda", generator=generator).bfloat16()
    weight *= inputs**-0.5
    tile = choose_wide_tile(32 if rows <= 32 else 64, outputs, inputs, gated, apart)
    assert tile is not None
    gate = FeedForward(outputs) if gated else None
    found = wide_product(Linear((Weight.plain(weight),)), x, gate, tile, PDL).float()
    wanted = F.linear(x.float(), weight.float())
    if gated:
        wanted = F.silu(wanted[:, :outputs]) * wanted[:, outputs:]
    else:
        assert found.shape == (tile.split, rows, outputs)
        found = found.sum(0)
    error = (found - wanted).norm() / wanted.norm()
    assert error < (2e-3 if gated else 1e-5)
