"""Products of decode steps of many rows against plain ones, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from engine.execute.cuda.add_norm import AddNorm, add_norm
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.many_row_linear import warpgroup_product, wide_product
from engine.execute.cuda.tiles import WarpgroupTile, WideTile, rounded
from models.network import Linear, NormWeights, Weight
from models.spec import FeedForward, Norm

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [
        (17, 40, 256, WideTile(32, 64, 2, 1, 2, 4)),
        (32, 16, 200, WideTile(16, 128, 4, 1, 1, 4)),  # fewer spans than stages, and no whole ones
        (9, 32, 300, WideTile(32, 64, 3, 1, 1, 4)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_the_plain_one(rows: int, outputs: int, inputs: int, tile: WideTile, bias: bool) -> None:
    x, weight = random(rows, inputs, seed=1), random(2 * outputs, inputs, seed=2)
    b = random(2 * outputs, seed=3) if bias else None
    linear = Linear((Weight.plain(weight),), b)
    plain = F.linear(x, weight, b)
    torch.testing.assert_close(wide_product(linear, x, None, tile, False), plain, rtol=1e-4, atol=1e-4)
    gate = FeedForward(outputs)
    wanted = F.silu(plain[:, :outputs]) * plain[:, outputs:]
    torch.testing.assert_close(wide_product(linear, x, gate, tile, False), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [
        (17, 80, 256, WarpgroupTile(64, 3, 1)),
        (64, 64, 200, WarpgroupTile(128, 4, 1)),  # fewer spans than stages, and no whole ones
        (9, 72, 300, WarpgroupTile(64, 2, 1)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_a_group_of_warps_is_the_plain_one(
    rows: int, outputs: int, inputs: int, tile: WarpgroupTile, bias: bool
) -> None:
    x, weight = random(rows, inputs, seed=1), random(2 * outputs, inputs, seed=2)
    b = random(2 * outputs, seed=3) if bias else None
    linear, gate = Linear((Weight.plain(weight),), b), FeedForward(outputs)
    plain = F.linear(x, weight, b)
    torch.testing.assert_close(warpgroup_product(linear, x, None, tile, False), plain, rtol=1e-4, atol=1e-4)
    wanted = F.silu(plain[:, :outputs]) * plain[:, outputs:]
    torch.testing.assert_close(warpgroup_product(linear, x, gate, tile, False), wanted, rtol=1e-4, atol=1e-4)
    if not bias:
        parts = warpgroup_product(linear, x, None, replace(tile, split=3), False)
        assert parts.shape == (3, rows, 2 * outputs)
        torch.testing.assert_close(parts.sum(0), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "split"), [(512, 4), (600, 3)])
def test_sums_that_stay_apart_are_added_by_the_norm(inputs: int, split: int) -> None:
    x, weight, residual = random(20, inputs, seed=1), random(48, inputs, seed=2), random(20, 48, seed=3)
    tile = WideTile(16, 64, 2, split, 2, 4)
    parts = wide_product(Linear((Weight.plain(weight),)), x, None, tile, False)
    assert parts.shape == (split, 20, 48)
    norm, post = ((Norm(), NormWeights(random(48, seed=seed))) for seed in (4, 5))
    for before in (None, post):
        out, total = torch.empty(2, 20, 48)
        add_norm(parts, residual, AddNorm(before, 0.5, norm), out, total)
        product = F.linear(x, weight)
        if before is not None:
            product = F.rms_norm(product, (48,), before[1].weight, Norm().eps)
        wanted = residual + 0.5 * product
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            out, F.rms_norm(wanted, (48,), norm[1].weight, Norm().eps), rtol=1e-4, atol=1e-4
        )


@given(
    count=st.integers(9, 300),
    outputs=st.integers(1, 1 << 17),
    inputs=st.integers(1, 1 << 15),
    gated=st.booleans(),
    apart=st.booleans(),
)
@example(64, 4096, 12_288, False, True)
@example(64, 6144, 4096, True, False)
def test_tiles_of_groups_of_warps_fit_into_a_multiprocessor(
    count: int, outputs: int, inputs: int, gated: bool, apart: bool
) -> None:
    tile = KernelConfigs().warpgroups(count, outputs, inputs, gated, apart)
    if tile is not None:
        held = 2 * tile.columns * (rounded(count) + (128 if gated else 64))
        assert held * tile.stages <= 200 * 1024
        assert tile.stages >= 2
        assert inputs % 8 == 0, "what is copied begins at a multiple of 16 bytes"
        assert tile.split == 1 or (apart and 6 * tile.split * 128 <= inputs + 127)
