"""Other compilers than the usual one, and processors of another kind."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from engine.kernels.native import compile as compiling
from engine.kernels.native.library import NativeLibrary, open_library
from tests.engine.native.conftest import LIBRARY
from tests.engine.native.test_products import KINDS, PLAIN, bound, random_weight

pytestmark = pytest.mark.skipif(LIBRARY in os.environ, reason="it compiles libraries of its own")

FOLDER = Path(__file__).parent
ARM = "aarch64-linux-gnu-g++"
COUNTS = (1, 2, 3, 8, 9, 13)
ROWS, COLUMNS = 37, 512


def compile_with(compiler: str, out: Path, extra: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile the library, or skip where there is no such compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.setenv("CXX", compiler)
    return compiling.compile_library(out, (extra,))


def test_clang_builds_a_library_that_finds_what_this_machine_runs(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = open_library(compile_with("clang++", tmp_path / "library.so", "-O0", monkeypatch))
    count, name = built.functions.ct_variants(), built.functions.ct_variant_name
    known = {name(number).decode() for number in range(count)}  # an old compiler does not know every variant
    assert built.variants.keys() == library.variants.keys() & known


def test_kernels_for_arm_compute_what_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = compile_with(ARM, tmp_path / "library.so", "-O1", monkeypatch)
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("it was compiled; qemu-aarch64, which would run it, is not installed")
    program = tmp_path / "products"
    include = f"-I{compiling.FOLDER}"
    command = [ARM, "-std=c++17", include, str(FOLDER / "products.cpp"), str(built), f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([*command, "-o", str(program)], check=True)
    weights = {kind: random_weight(kind, ROWS, COLUMNS) for kind in KINDS}
    x = np.random.default_rng(1).standard_normal((max(COUNTS), COLUMNS)).astype(np.float32)
    given = b""
    for kind, weight in weights.items():
        for count in COUNTS:
            job = np.array([int(kind), ROWS, COLUMNS, weight.data.shape[1], count], np.int32)
            given += job.tobytes() + weight.data.tobytes() + x[:count].tobytes()
    command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", str(program)]
    done = subprocess.run(command, input=given, capture_output=True, check=True)
    products = np.frombuffer(done.stdout, np.float32).reshape(len(KINDS), sum(COUNTS), ROWS)
    for (kind, weight), found in zip(weights.items(), products, strict=True):
        by_count = np.split(found, np.cumsum(COUNTS)[:-1])
        for row, given_row in zip(by_count[-1], x, strict=True):
            exact = weight.numbers @ given_row.astype(np.float64)
            as_rounded = kind if kind in PLAIN else Kind.Q8_0
            assert (np.abs(row - exact) <= bound(weight, as_rounded, given_row)).all(), kind.name
        for some in by_count:
            np.testing.assert_array_equal(some, by_count[-1][: len(some)], kind.name)
