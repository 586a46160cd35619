"""The recurrences of prompts, compiled for GPUs that need not be here."""

from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.kernels.test_compiled import compiled

RECURRENCES = """
from engine.kernels.triton.recurrence import LINES, REGISTERS, STAGES, TILE, WARPS
from engine.kernels.triton.recurrence_inputs import delta_inputs_kernel, mamba_inputs_kernel
from engine.kernels.triton.recurrence_rows import walk_kernel

numbers = ("queries", "keys", "factors", "betas", "steps", "states", "dt_bias", "rates", "skip")
TYPES.update(dict.fromkeys(numbers, "*fp32"), spans="*i32", saves="*i32", places="*i32", slots="*i32")
TYPES["count"] = "i32"
found = []
for capability in (86, 90):
    for delta in (True, False):
        shape = dict(HEADS=48, K=128, V=128 if delta else 64, KEYS=128)
        cut = dict(DELTA=delta, ALTERNATING=False, TILE=TILE, STAGES=STAGES, WARPS=WARPS)
        cut |= dict(KEY_HEADS=16, skip="pointer") if not delta else dict(KEY_HEADS=16, skip=None)
        text, shared = ptx(walk_kernel, WARPS, shape | cut, capability=capability, maxnreg=REGISTERS)
        found.append([shared, ".local" in text, text.count("bar.sync"), text.count("shfl.sync") // TILE])
        shape |= dict(VALUES=shape["V"], SIZE=10336, STRIDE=16384, GATES=96, WIDTH=4, LINES=LINES)
        space = dict(GROUPS=16, LEAST=0.0, MOST=float("inf"), bias="pointer", X=0.5, B=1.0, C=0.3, DT=2.0)
        shape |= dict(KEY_HEADS=16) if delta else space
        text, shared = ptx(delta_inputs_kernel if delta else mamba_inputs_kernel, 4, shape, ASTSource, capability)
        found.append([shared, ".local" in text])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return compiled((RECURRENCES,))


def test_recurrences_keep_states_in_registers_and_sums_over_keys_in_a_warp(made: dict[str, Any]) -> None:
    found = made[RECURRENCES]
    for number, (shared, spills, barriers, exchanges) in enumerate(found[::2]):
        assert shared <= 48 * 1024, "several programs must fit on a multiprocessor"
        assert not spills
        assert barriers == 2, "only where a tile of rows has come, and where the next one may"
        sums = 2 if number % 2 == 0 else 1
        assert exchanges == sums * 6, "of two columns three times"
    for shared, spills in found[1::2]:
        assert shared <= 48 * 1024
        assert not spills
