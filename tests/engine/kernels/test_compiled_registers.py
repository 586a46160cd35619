"""Kernels for wide networks keep what they hold in registers, on a GPU that need not be here."""

import pytest

pytest.importorskip("triton")

from tests.engine.kernels.test_compiled import compiled

SPILLED = """
import subprocess, tempfile

def spilled(text):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [int(number) for number in re.findall("([0-9]+) bytes spill", said)]
"""
NORMED = """
from engine.kernels.triton.linear import linear_kernel

def linear(outputs, inputs, gated):
    tile = KernelConfigs().product(1, outputs, inputs, gated, None)
    constants = dict(COUNT=1, N=outputs, K=inputs, EPS=1e-6, NORM=True, BIAS=False, GATED=gated, RESIDUAL=False)
    cut = dict(FOLDS=tile.folds, WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, PDL=True, BY_SPAN=True)
    return spilled(ptx(linear_kernel, tile.warps, constants | cut | dict(GATE=Gate("gelu_tanh")))[0])

print(json.dumps([linear(15360, 3840, True), linear(21504, 5376, True), linear(262144, 3840, False)]))
"""

ROUTED = """
from engine.kernels.triton.routing import router_kernel

found = []
for count, warps in ((64, 4), (128, 4), (256, 8), (512, 8)):
    constants = dict(COUNT=count, CHOSEN=8, K=2048, EPS=1e-6, BIAS=False, SELECTION_BIAS=False, SIGMOID=False)
    more = dict(RENORMALISE=True, PER=2, PDL=True, expert_scales=None, FOLLOWS=True)
    text, _ = ptx(router_kernel, warps, constants | more, ASTSource)
    found.append([text.count("redux.sync"), *spilled(text)])
print(json.dumps(found))
"""


def test_sums_of_squares_leave_registers_for_products_of_gemma() -> None:
    """Gate and up of Gemma 4 12B and 31B, and the head."""
    for spilled in compiled((SPILLED + NORMED,))[SPILLED + NORMED]:
        assert spilled == [0, 0]


def test_experts_are_ranked_without_sums_over_threads() -> None:
    for found in compiled((SPILLED + ROUTED,))[SPILLED + ROUTED]:
        assert found == [0, 0, 0]
