"""How the rows of a product are dealt to cores of different speed."""

import subprocess
from collections.abc import Sequence
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


def relative_times(
    dealing: Path, speeds: Sequence[float | str], rows: tuple[int, int] = (4096, 49152)
) -> list[float]:
    """How long products take on cores of such speeds, by default with the rows of a layer and of a head, relative to
    those of an even load."""
    command = [str(dealing), *map(str, rows), *map(str, speeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return [float(time) for time in done.stdout.split()]


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
    assert all(time <= most for time in relative_times(dealing, speeds))


def test_a_core_that_another_program_shares_is_better_left_to_it(dealing: Path) -> None:
    """All threads wait for one that its core makes pause, however little it has to do: see `Runner.leave_cores`."""
    shared, left = (
        sum(relative_times(dealing, speeds, (4096, 4096))) / 2
        for speeds in ([1.0] * 3 + ["2000:2000"], [1.0] * 3)
    )
    assert 3 / left >= 1.3 * 3.5 / shared
