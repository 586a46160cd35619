"""Kernels with quantised weights against their dequantised twins, in fp32 and in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.packed import ordered_plane_args, packed_embedding, packed_product
from engine.execute.cuda.tiles import LANES, Tile
from engine.kernels.triton.packed_linear import packed_linear_kernel
from models.network import Weight
from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS
from models.weights.packing import Planes, empty_planes, pack, unpack
from tests.covering import each_value_once
from tests.models.test_packing import random_blocks

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)


CASES = {
    "plain": (Tile(1, 1, 1, 2), 1, 21, 768),
    "norm": (Tile(1, 2, 2, 1), 2, 40, 768),
    "bias": (Tile(1, 2, 1, 2), 8, 30, 512),
    "gated": (Tile(1, 1, 2, 2), 3, 24, 256),
    "gated norm": (Tile(1, 4, 1, 1), 8, 16, 768),
    "residual": (Tile(1, 2, 1, 1), 1, 32, 1280),
}
"""By what stands around the product: its tile, rows, outputs and inputs."""
OTHERS = [part for part in CASES if part not in ("plain", "gated norm")]
PAIRS = [(kind, part) for kind in BLOCKS for part in ("plain", "gated norm")]
PAIRS += [(kind, OTHERS[number % len(OTHERS)]) for number, kind in enumerate(BLOCKS)]
"""Each type alone and with most around it, and everything that may stand there with some of the types."""


def packed(
    kind: Kind, rows: int, columns: int, seed: int, ordered: bool = False
) -> tuple[Planes, torch.Tensor]:
    data = random_blocks(kind, rows, columns // kind.block, seed)
    planes = empty_planes(kind, rows, columns, CPU)
    pack(data, planes)
    if ordered:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).int()
        planes = replace(planes, order=order)
    return planes, unpack(planes, torch.arange(rows))


@pytest.mark.parametrize(("kind", "part"), PAIRS, ids=lambda given: getattr(given, "name", given))
def test_a_product_is_that_of_the_twin_with_what_stands_around_it(kind: Kind, part: str) -> None:
    check_product(kind, part)
    if BLOCKS[kind].shared == 1:
        check_product(kind, part, lanes=LANES)


@each_value_once
@pytest.mark.parametrize("part", ["norm", "gated norm", "bias"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_row_in_lanes_has_the_same_bits_in_any_company(kind: Kind, part: str) -> None:
    given = Given(kind, part)
    alone = torch.cat([given.product(row[None], LANES) for row in given.x])
    for count in range(2, 9):
        assert torch.equal(given.product(given.x[:count], LANES), alone[:count]), count


@pytest.mark.parametrize("part", ["norm", "gated norm", "residual"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_tiles_and_copies_ahead_do_not_change_the_bits(kind: Kind, part: str) -> None:
    given = Given(kind, part)
    usual = given.product(given.x, LANES)
    for across, ahead in ((1, 1), (1, 4), (2, 2), (4, 3)):
        assert torch.equal(given.product(given.x, LANES, across, ahead), usual), (across, ahead)


@pytest.mark.parametrize("part", ["norm", "gated norm", "residual"])
def test_columns_may_lie_in_another_order(part: str) -> None:
    check_product(Kind.INT4_128, part, ordered=True)
    planes, numbers = packed(Kind.INT4_64, 37, 768, 3, ordered=True)
    weight = Weight.packed(planes)
    assert torch.equal(packed_product(torch.eye(768), [weight, weight], None)[:, 37:], numbers.t())


class Given:
    """A product with all that may stand around it; 8 rows."""

    def __init__(self, kind: Kind, part: str, ordered: bool = False) -> None:
        self.part = part
        self.cut, _, self.outputs, inputs = CASES[part]
        generator = torch.Generator().manual_seed(self.outputs)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.gated = part.startswith("gated")
        lines = 2 * self.outputs if self.gated else self.outputs
        planes, self.numbers = packed(kind, lines, inputs, 5, ordered)
        self.weight = Weight.packed(planes)
        self.x, self.scale = random(8, inputs), random(inputs)
        self.bias, self.residual = random(lines), random(8, self.outputs)

    def product(self, x: torch.Tensor, lanes: int, tiles: int = 0, ahead: int = 0) -> torch.Tensor:
        out = torch.full((8, self.outputs), 7.0)
        cut = replace(self.cut, tiles=tiles or self.cut.tiles, ahead=ahead or self.cut.ahead)
        packed_linear_kernel[(-(-self.outputs // cut.outputs(self.gated)),)](
            x,
            bias=self.bias,
            norm_weight=self.scale,
            residual=self.residual,
            out=out,
            COUNT=len(x),
            N=self.outputs,
            K=x.shape[1],
            STRIDE=self.outputs,
            EPS=1e-6,
            NORM=self.part.endswith("norm"),
            BIAS=self.part in ("bias", "gated"),
            GATED=self.gated,
            RESIDUAL=self.part == "residual",
            WARPS=cut.warps,
            TILES=cut.tiles,
            AHEAD=cut.ahead,
            LANES=lanes,
            **ordered_plane_args(self.weight),
            PDL=False,
            num_warps=cut.warps,
        )
        assert (out[len(x) :] == 7.0).all()
        return out[: len(x)]


def check_product(kind: Kind, part: str, ordered: bool = False, lanes: int = 1) -> None:
    given, count = Given(kind, part, ordered), CASES[part][1]
    x = given.x[:count]
    y = F.rms_norm(x, x.shape[1:], given.scale, 1e-6) if part.endswith("norm") else x
    y = F.linear(y, given.numbers)
    if part in ("bias", "gated"):
        y = y + given.bias
    if given.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if part == "residual":
        y = y + given.residual[:count]
    torch.testing.assert_close(given.product(x, lanes), y, rtol=1e-4, atol=3e-5 * float(y.abs().max()))


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_twin(kind: Kind) -> None:
    planes, numbers = packed(kind, 37, 768, 3)
    weight = Weight.packed(planes)
    x = torch.eye(768)
    assert torch.equal(packed_product(x, [weight], None), numbers.t())
    ids = torch.tensor([36, 0, 36, 9])
    assert torch.equal(packed_embedding(weight, ids, torch.float32), numbers[ids])


def test_a_product_of_many_rows_takes_a_part_of_a_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [packed(kind, rows, 256, 3) for kind, rows in ((Kind.Q4_K, 24), (Kind.Q6_K, 17))]
    weights = [Weight.packed(planes) for planes, _ in found]
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(30, 256, generator=generator), torch.randn(41, generator=generator)
    expected = F.linear(x, torch.cat([numbers for _, numbers in found]), bias)
    for scratch in (1 << 20, 256 * 10, 1):
        monkeypatch.setattr("engine.execute.cuda.packed.SCRATCH", scratch)
        torch.testing.assert_close(packed_product(x, weights, bias), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_tiles_are_powers_of_two_and_fit_a_multiprocessor(kind: Kind) -> None:
    cuts = KernelConfigs()
    for inputs in (64, 1024, 3072, 4096, 12288, 28672):
        for outputs, gated in ((1024, False), (4096, False), (12288, True), (151936, False)):
            for rows in (1, 4, 8, 16):
                tile = cuts.product(rows, outputs, inputs, gated, kind)
                for size in (tile.warps, tile.tiles, tile.outputs(gated)):
                    assert size >= 1
                    assert size & (size - 1) == 0
                held = 2 * BLOCKS[kind].tile_bytes + (16 if BLOCKS[kind].supers else 0)
                # The smallest GPUs with tensor cores have 100 KB.
                assert held * tile.warps * tile.tiles * tile.ahead <= 99 * 1024
