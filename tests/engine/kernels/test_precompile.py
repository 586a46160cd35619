"""Kernels that other processes compile: those that were launched, into the cache in which a launch looks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json
import torch
import triton
from triton.backends.compiler import GPUTarget
from engine.kernels.triton.precompile import Compilers, compile_launch, recorded
from engine.kernels.triton.linear import linear_kernel

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
x = torch.zeros(1, 128, dtype=torch.bfloat16)
weight = torch.zeros(16, 128, dtype=torch.bfloat16)
left = dict(partial=x.float(), lse=x.float(), active=x.int(), counters=x.long(), ATTENDED=(64, 128, 80, 2))

def launch(warps, run=linear_kernel[(1,)]):
    has = 1 if warps == 4 else warps
    flags = dict(NORM=False, BIAS=False, GATED=False, RESIDUAL=False, FOLDS=1, WARPS=warps, TILES=1, AHEAD=1)
    return run(x, weight, x, x, x, x, COUNT=1, N=16, K=128, EPS=0.0, PDL=True, **flags, **left, num_warps=has)

hits = []
triton.knobs.compilation.listener = lambda **told: hits.append(bool(told["cache_hit"]))
with recorded() as found:
    launched = [launch(warps) for warps in (1, 4, 1)]
compilers = Compilers(2)
errors = [compilers.compile(one).result() for one in found]
again = compilers.compile(found[0]).result()
compilers.close()
closed = compilers._all[0].poll() is not None
compiled_here = len(hits)
launch(1, lambda *given, **named: linear_kernel.warmup(*given, **named, grid=(1,)))
print(json.dumps({
    "launched": [one is not None for one in launched], "names": [one.name for one in found], "errors": errors,
    "again": again, "closed": closed, "compiled_here": compiled_here, "hits": hits,
    "hook": triton.knobs.runtime.jit_cache_hook is None}))
"""


def test_what_is_launched_is_compiled_by_others_and_found_in_the_cache(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    assert found["launched"] == [False] * 3, "what is recorded does not run"
    assert found["names"] == ["engine.kernels.triton.linear.linear_kernel"] * 3
    assert found["errors"][0] is found["errors"][2] is found["again"] is None
    assert found["errors"][1], "a kernel for four warps has one, and the next one is compiled all the same"
    assert (found["compiled_here"], found["hits"]) == (0, [True])
    assert found["closed"]
    assert found["hook"], "from then on kernels are compiled where they are launched"
