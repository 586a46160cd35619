"""The Gluon kernels, compiled for a GPU that need not be here: the interpreter knows neither layouts nor registers."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from engine.execute.cuda.tiles import choose_chunking, choose_tile
from engine.kernels.triton.attention import attention_kernel
from engine.kernels.triton.linear import linear_kernel

TYPES = {"active": "*i32", "tables": "*i32", "counters": "*i64", "partial": "*fp32", "lse": "*fp32"} | {
    "scale_log2": "fp32", "table_stride": "i32", "begin": "i32", "end": "i32"}

def ptx(kernel, warps, constants):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*bf16") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    values = {(names.index(n),): value for n, value in constants.items()}
    source = GluonASTSource(kernel, signature, values, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return made.asm["ptx"], made.metadata.shared

def linear(outputs, inputs, **flags):
    tile = choose_tile(outputs, inputs, flags.get("GATED", False))
    constants = dict(COUNT=8, N=outputs, K=inputs, EPS=1e-6, NORM=False, BIAS=False, GATED=False, RESIDUAL=False)
    cut = dict(FOLDS=tile.folds, WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, PDL=True)
    text, shared = ptx(linear_kernel, tile.warps, constants | cut | flags)
    before = text[: text.index("griddepcontrol.wait;")]
    spans = -(-inputs // (tile.warps * tile.folds * 128))
    early = re.findall(r"cp\\.async\\.cg\\S* \\[[^,]*, \\[[^,]*, 0x10", before)
    return {"early": len(early), "held": 8 * tile.tiles * min(tile.ahead, spans), "ldmatrix": text.count("ldmatrix"),
            "read": len(re.findall(r"ld\\.shared\\.v4", text)), "spans": spans if spans * tile.folds <= 6 else 1,
            "tiles": tile.tiles, "products": text.count("mma.sync"), "folds": tile.folds}

def attention(limit, group, dim):
    cut = choose_chunking(limit)
    constants = dict(SOME=False, CHUNKS=80, HQ=8 * group, HKV=8, D=dim, EPS=1e-6, NORM=True, BLOCK=256, PDL=True)
    held = cut.tile * dim // (256 * cut.warps)
    constants |= dict(WARPS=cut.warps, R=held, TILES=cut.tiles, STAGES=min(cut.tiles, 3), SPARE=20, shared=None)
    text, shared = ptx(attention_kernel, cut.warps, constants)
    before = text[: text.rindex("griddepcontrol.wait;")]
    needed = shared - 20 * cut.warps * 512
    return {"early": before.count("cp.async.cg"), "held": 2 * held * min(cut.tiles, 3), "shared": needed}

print(json.dumps([
    linear(4096, 1024, NORM=True), linear(3072, 1024, NORM=True, GATED=True),
    linear(1000, 576, RESIDUAL=True, BIAS=True), linear(4096, 12288, RESIDUAL=True),
    attention(640, 2, 128), attention(40960, 3, 64),
]))
"""


def test_what_may_be_loaded_early_is_and_nothing_goes_another_way() -> None:
    """Weights are copied 16 bytes at a time before the wait, and a thread reads what it copied."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    *products, short, long = json.loads(ran.stdout)
    for found in products:
        assert found["early"] == found["held"]
        assert found["ldmatrix"] == 0, "a thread would read what another one copied"
        assert found["read"] >= 8 * found["tiles"] * found["spans"]
        assert found["products"] == 8 * found["folds"] * found["tiles"] * found["spans"]
    for found in (short, long):
        assert found["early"] == found["held"]
        assert found["shared"] <= 113 * 1024, "two programs must fit on a multiprocessor"
