"""Products that prepare their output for the product that norms it, in Triton's interpreter."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from engine.execute.cuda import step_products
from engine.execute.cuda.packed import plane_args
from engine.execute.cuda.tiles import Tile
from engine.kernels.triton.fused_norm import add_prepared_kernel
from engine.kernels.triton.linear import linear_kernel
from engine.kernels.triton.packed_linear import packed_linear_kernel
from engine.kernels.triton.pointwise import Gate
from models.loading.load import load_model
from models.network import Network, Weight
from models.weights.block_formats import Kind
from tests.covering import each_value_once
from tests.engine.kernels.test_packed import packed
from tests.engine.kernels.test_rows import Case, fused
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
HIDDEN, INNER, OUTPUTS, ROWS = 352, 384, 24, 11
"""HIDDEN is no multiple of a program's outputs."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["plain", "quantised"])
def layers(request: pytest.FixtureRequest) -> list[Weight]:
    """A product that writes x, and one that norms it."""
    shapes = [(HIDDEN, INNER), (2 * OUTPUTS, HIDDEN)]
    if request.param == "plain":
        return [Weight.plain(random(*shape, seed=seed) / 20) for seed, shape in enumerate(shapes)]
    kind = Kind.Q4_0
    return [Weight.packed(packed(kind, *shape, 1)[0]) for shape in shapes]


class Kernel:
    """A kernel that `launch` launches."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        return partial(self._launch, grid)


def multiply(weight: Weight, warps: int, tiles: int, gated: bool, **given: Any) -> int:
    """Launch a product of `weight`; return its number of programs."""
    tile = Tile(1, warps, tiles, 2)
    outputs = weight.rows // (2 if gated else 1)
    programs = -(-outputs // tile.outputs(gated))
    kernel, matrix = linear_kernel, {"weight": weight.data, "FOLDS": 1}
    if weight.planes is not None:
        kernel, matrix = packed_linear_kernel, {**plane_args(weight), "STRIDE": outputs}
    given = {"norm_weight": weight.data, "residual": weight.data, "RESIDUAL": False, "NORM": False} | given
    kernel[(programs,)](
        bias=weight.data, N=outputs, K=weight.columns, EPS=1e-6, BIAS=False, GATED=gated, WARPS=warps,
        TILES=tiles, AHEAD=2, PDL=False, num_warps=warps, **matrix, **given,
    )  # fmt: skip
    return programs


def both(layers: list[Weight], rows: list[int], offset: float, prepares: bool) -> tuple[Tensor, ...]:
    """Multiply some rows by both layers; return x, x as it was prepared, and the result."""
    given, x, norm = (
        random(ROWS, INNER, seed=5)[rows],
        random(ROWS, HIDDEN, seed=6)[rows],
        random(HIDDEN, seed=7),
    )
    found, out = torch.full((len(rows), HIDDEN), 7.0), torch.full((len(rows), OUTPUTS), 7.0)
    sums = torch.full((len(rows), HIDDEN // 8), float("nan"))
    warps, tiles, count = 2, 4, {"COUNT": len(rows)}
    programs = -(-HIDDEN // (16 * tiles)) if prepares else 0
    left = {"prepared": found, "square_sums": sums, "norm_weight": norm, "OFFSET": offset, **count}
    added = {"x": given, "residual": x, "out": x, "RESIDUAL": True, "PREPARES": programs}
    first = multiply(layers[0], warps, tiles, False, **added, **(left if prepares else count))
    assert first == programs or not prepares
    normed = {"x": found if prepares else x, "out": out, "NORM": True, "PREPARED": programs}
    multiply(layers[1], warps, 1, True, **normed, **left)
    return x, found, out


@each_value_once
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_product_prepares_its_output_for_the_norm_of_the_next(layers: list[Weight], offset: float) -> None:
    rows = list(range(8))
    x, _, expected = both(layers, rows, offset, False)
    same, prepared, out = both(layers, rows, offset, True)
    assert torch.equal(same, x)
    assert torch.equal(prepared, x * (random(HIDDEN, seed=7) + offset))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for some in ([5], [3, 0, 7]):
        assert torch.equal(both(layers, some, offset, True)[2], out[some])
    many = both(layers, list(range(ROWS)), offset, True)[2]  # the interpreter adds these up in another order
    torch.testing.assert_close(many[:8], out, rtol=1e-4, atol=1e-4 * float(out.abs().max()))


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (1.0, 0.3)])
def test_the_norm_of_what_a_product_prepared_is_added(
    layers: list[Weight], offset: float, scale: float
) -> None:
    """Multiplied by a factor or not; a row gets the same bits in any company."""
    after, found = random(HIDDEN, seed=7), {}
    for rows, factor in product(([5], [3, 0, 7], list(range(8))), (None, torch.tensor([0.7]))):
        given, x = random(ROWS, INNER, seed=5)[rows], random(ROWS, HIDDEN, seed=6)[rows]
        prepared, apart = (torch.full((len(rows), HIDDEN), 7.0) for _ in range(2))
        sums = torch.full((len(rows), HIDDEN // 8), float("nan"))
        shared = {"prepared": prepared, "square_sums": sums, "COUNT": len(rows)}
        how = {"x": given, "out": apart, "norm_weight": after, "OFFSET": offset, "PREPARES": -(-HIDDEN // 64)}
        programs = multiply(layers[0], 2, 4, False, **how, **shared)
        total, named = x.clone(), {"K": HIDDEN, "EPS": 1e-5, "SCALE": scale, "factor": factor}
        grid = (-(-HIDDEN // 512),)
        add_prepared_kernel[grid](
            total, PREPARED=programs, WARPS=4, PDL=False, num_warps=4, **shared, **named
        )
        expected = x + scale * F.rms_norm(apart, (HIDDEN,), after + offset, 1e-5)
        torch.testing.assert_close(
            total, expected * (1.0 if factor is None else factor), rtol=1e-5, atol=1e-5
        )
        found[factor is None, tuple(rows)] = total
    for without in (True, False):
        assert torch.equal(found[without, (5,)], found[without, tuple(range(8))][5:6])
        assert torch.equal(found[without, (3, 0, 7)], found[without, tuple(range(8))][[3, 0, 7]])


def test_a_product_gates_what_lies_beside_it(layers: list[Weight]) -> None:
    given, wide = random(3, INNER, seed=5), random(3, 2 * HIDDEN, seed=6)
    found, plain = torch.full((3, HIDDEN), 7.0), torch.full((3, HIDDEN), 7.0)
    up = wide[:, HIDDEN:]
    multiply(layers[0], 2, 1, False, x=given, out=plain, COUNT=3)
    how: dict[str, Any] = {"residual": up, "RESIDUAL": True, "BESIDE": 2 * HIDDEN, "GATE": Gate("gelu_tanh")}
    multiply(layers[0], 2, 1, False, x=given, out=found, COUNT=3, **how)
    torch.testing.assert_close(found, F.gelu(plain, approximate="tanh") * up, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Network:
    config = tiny_qwen3(num_hidden_layers=2, head_dim=64, vocab_size=24)
    folder = write_checkpoint(tmp_path_factory.mktemp("prepared"), config)
    return load_model(files_of(folder), dtype=torch.float32, device=torch.device("cpu"))


def test_a_step_in_which_products_prepare_what_follows_gives_the_same(
    model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []

    def launch(grid: tuple[int], *given: Any, **named: Any) -> Any:
        prepared.append(named["PREPARED"] > 0)
        return linear_kernel[grid](*given, **named)

    case = Case(model, [0, 130, 17, 5, 70, 64, 1, 33, 31])
    decoder = fused(case, model)
    usual, written = case.run(decoder, [2, 0, 1], 8)
    monkeypatch.setattr(step_products, "wants_norm", lambda layer: True)
    monkeypatch.setattr(step_products, "linear_kernel", Kernel(launch))
    logits, cache = case.run(decoder, [2, 0, 1], 8)
    normed = [number for number, is_prepared in enumerate(prepared) if is_prepared]
    assert normed == [2, 4, 6, 8], "all but the first, whose input is the embedding"
    torch.testing.assert_close(logits, usual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, written, rtol=1e-5, atol=1e-5)
    assert torch.equal(case.run(decoder, [1], 1)[0][0], logits[2])
