"""Other compilers than the usual one, and processors of another kind."""

import os
import random
import shutil
import subprocess
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from engine.kernels.native import compile as compiling
from engine.kernels.native.library import NativeLibrary, open_library
from tests.engine.native.conftest import LIBRARY
from tests.engine.native.test_products import KINDS, PLAIN, SMALL, bound, random_weight

pytestmark = pytest.mark.skipif(LIBRARY in os.environ, reason="it compiles libraries of its own")

FOLDER = Path(__file__).parent
ARM = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
COUNTS = (1, 2, 3, 4, 6, 8, 9, 13, 40)
ROWS, COLUMNS = 37, 512
WHOLE = 32
"""The rows of whole panels, which can be interleaved."""


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


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """products.cpp with the library for ARM, or a skip."""
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        built = compile_with(ARM, folder / "library.so", "-O1", patch)
    if shutil.which(EMULATOR[0]) is None:
        pytest.skip("it was compiled; qemu-aarch64, which would run it, is not installed")
    program = folder / "products"
    include = f"-I{compiling.FOLDER}"
    command = [ARM, "-std=c++17", include, str(FOLDER / "products.cpp"), str(built), f"-Wl,-rpath,{folder}"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    ("processor", "variants"),
    [
        ("cortex-a72", ["portable"]),
        ("neoverse-n1", ["portable", "dotprod"]),
        ("max", ["portable", "dotprod", "i8mm"]),
    ],
)
def test_a_processor_for_arm_runs_what_it_has_instructions_for(
    arm: Path, processor: str, variants: list[str]
) -> None:
    done = subprocess.run(
        [*EMULATOR, "-cpu", processor, str(arm)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == variants


def test_the_checksum_on_arm_is_that_of_zlib(arm: Path) -> None:
    for count in (0, 1, 7, 8, 9, 4097):
        data = random.Random(count).randbytes(count)
        done = subprocess.run([*EMULATOR, str(arm), "crc32"], input=data, capture_output=True, check=True)
        assert int(done.stdout) == crc32(data), count


@pytest.mark.parametrize("variant", ["portable", "dotprod", "i8mm"])
def test_kernels_for_arm_compute_what_the_others_do(arm: Path, variant: str) -> None:
    weights = {kind: random_weight(kind, ROWS, COLUMNS) for kind in KINDS}
    x = np.random.default_rng(1).standard_normal((max(COUNTS), COLUMNS)).astype(np.float32)
    given = b""
    for kind, weight in weights.items():
        for count in COUNTS:
            job = np.array([int(kind), ROWS, COLUMNS, weight.data.shape[1], count], np.int32)
            given += job.tobytes() + weight.data.tobytes() + x[:count].tobytes()
    done = subprocess.run([*EMULATOR, str(arm), variant], input=given, capture_output=True, check=True)
    products = np.frombuffer(done.stdout, np.float32)
    for kind, weight in weights.items():
        rows, by_count = [ROWS, WHOLE] if kind in SMALL and variant != "portable" else [ROWS], []
        for count in COUNTS:
            found, products = np.split(products, [count * sum(rows)])
            plain, *interleaved = np.split(found, [count * ROWS][: len(rows) - 1])
            by_count.append(plain.reshape(count, ROWS))
            for same in interleaved:
                np.testing.assert_array_equal(same.reshape(count, WHOLE), by_count[-1][:, :WHOLE], kind.name)
        for row, given_row in zip(by_count[-1], x, strict=True):
            exact = weight.numbers @ given_row.astype(np.float64)
            as_rounded = kind if kind in PLAIN else Kind.Q8_0
            assert (np.abs(row - exact) <= bound(weight, as_rounded, given_row)).all(), kind.name
        for some in by_count:
            np.testing.assert_array_equal(some, by_count[-1][: len(some)], kind.name)
    assert products.size == 0
