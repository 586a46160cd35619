"""The kernels of latent attention, compiled for GPUs that need not be here."""

from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.kernels.test_compiled import compiled

LATENTS = """
from engine.kernels.triton.combine import combine_kernel
from engine.kernels.triton.latent_attention import latent_kernel
from engine.kernels.triton.linear import HeadInputs, linear_kernel

from engine.execute.cuda.tiles import by_head
from engine.kernels.triton.packed_linear import packed_linear_kernel

found = {"attention": [], "products": []}
for capability, tile, heads, width, chunks in ((90, 64, 20, 64, 64), (86, 32, 16, 64, 64), (90, 64, 40, 32, 8)):
    groups = -(-heads // 16)
    shape = dict(HEADS=heads, GROUP=-(-heads // groups), DIM=256, WIDTH=width, PIECES=512 // width + 1, EPS=1e-6)
    shape |= dict(OFFSET=0.0, ONCE=False, ROTATED=True, PAIRS=True, EXACT=heads == 16, BLOCK=32, TILE=tile)
    shape |= dict(STAGES=2, CHUNK=64, DOUBLINGS=2, CHUNKS=chunks, WARPS=4, PDL=capability >= 90)
    text, shared = ptx(latent_kernel, 4, shape, capability=capability)
    before = text.split("griddepcontrol.wait;")[:2]  # the first is of programs that have nothing to do
    early = sum(part.count("cp.async.cg") for part in before) if capability >= 90 else None
    found["attention"].append([early, 2 * tile * (512 + width) // 8 // 128, shared, ".local" in text])
for outputs, inputs, apart in ((512, 192, 256), (256, 512, 512)):
    tile = by_head(KernelConfigs().product(1, 20 * outputs, inputs, False, None), outputs, inputs, None)
    shape = dict(COUNT=8, N=20 * outputs, K=inputs, EPS=1e-6, NORM=False, BIAS=False, GATED=False, RESIDUAL=False)
    shape |= dict(FOLDS=tile.folds, WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, PDL=True)
    shape |= dict(HEADS=HeadInputs(outputs, apart, 20 * apart))
    text, shared = ptx(linear_kernel, tile.warps, shape)
    if inputs == 512:
        ptx(linear_kernel, tile.warps, shape | dict(COUNT=1, ATTENDED=(512, 64, 20, 10240), **LEFT))
    before = text[: text.index("griddepcontrol.wait;")]
    found["products"].append([before.count("cp.async.cg"), ".local" in text])
TYPES |= {"codes": "*i32", "more": "*i32", "scales": "*fp16", "supers": "*fp16"}
for kind in (Kind.Q4_0, Kind.Q8_0):
    for outputs, inputs, apart in ((512, 192, 256), (256, 512, 512)):
        tile = by_head(KernelConfigs().product(1, 20 * outputs, inputs, False, kind), outputs, inputs, kind)
        shape = dict(N=20 * outputs, K=inputs, STRIDE=20 * outputs, EPS=1e-6, NORM=False, BIAS=False, GATED=False)
        shape |= dict(RESIDUAL=False, WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, LANES=tile.lanes)
        shape |= dict(PDL=True, CODES=codes_of(kind), HEADS=HeadInputs(outputs, apart, 20 * apart))
        for count in (1, 8):
            more = dict(ATTENDED=(512, 64, 20, 10240), **LEFT) if (count, inputs) == (1, 512) else {}
            text, shared = ptx(packed_linear_kernel, tile.warps, shape | dict(COUNT=count) | more)
            before = text[: text.index("griddepcontrol.wait;")]
            found["products"].append([before.count("cp.async.c"), ".local" in text])
combined = dict(HQ=20, D=512, DIM=512, CHUNK=64, DOUBLINGS=2, CHUNKS=64, PADDED=64, PDL=True, IN_ORDER=20)
ptx(combine_kernel, 16, combined, ASTSource)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    found: dict[str, Any] = compiled((LATENTS,))[LATENTS]
    return found


def test_attention_copies_rows_before_it_waits_and_keeps_sums_in_registers(made: dict[str, Any]) -> None:
    for (early, copies, shared, spills), most in zip(made["attention"], (227, 99, 227), strict=True):
        assert early in (copies, None)
        assert shared <= most * 1024
        assert not spills


def test_products_of_heads_copy_weights_before_they_wait(made: dict[str, Any]) -> None:
    for early, spills in made["products"]:
        assert early > 0
        assert not spills
