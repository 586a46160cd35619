"""How the rows of a product are dealt to cores of different speed."""

import subprocess
from pathlib import Path

import pytest

from engine.kernels.native import compile as compiling
from tests.counting import PATIENCE


@pytest.fixture(scope="module")
def dealing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled dealing.cpp, or a skip."""
    program = tmp_path_factory.mktemp("dealing") / "dealing"
    try:
        compiler = compiling.find_compiler().split()
    except compiling.CompileError as error:
        pytest.skip(str(error))
    sources = [
        Path(__file__).with_name("dealing.cpp"),
        compiling.FOLDER / "team.cpp",
        compiling.FOLDER / "pool.cpp",
    ]
    include = f"-I{compiling.FOLDER}"
    subprocess.run(
        [*compiler, "-std=c++17", "-pthread", include, *map(str, sources), "-o", str(program)], check=True
    )
    return program


@pytest.mark.parametrize(
    ("speeds", "most"),
    [
        ([1.0] * 2, 1.0),
        ([1.0] * 5, 1.05),
        ([1.0] * 8 + [0.55] * 7, 1.2),
        ([1.0] * 4 + [0.3] * 3, 1.2),
        ([1.0] * 6 + [0.35] * 5, 1.2),
        ([1.0] * 4 + [0.25] * 3, 1.2),
        ([1.0, 0.2], 1.2),
    ],
    ids=str,
)
def test_nobody_waits_for_slow_cores(dealing: Path, speeds: list[float], most: float) -> None:
    """Times relative to those of an even load, of products with the rows of a layer and of a head."""
    command = [str(dealing), "4096", "49152", *map(str, speeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert all(float(time) <= most for time in done.stdout.split()), done.stdout
