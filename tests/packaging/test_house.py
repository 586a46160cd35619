"""The layout of the packages, where the contracts in pyproject.toml cannot express it."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["chatterm", "engine", "models"]
MOST_FILES = 10
MOST_LINES = 500


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_made_of_rooms(package: str) -> None:
    """Each module belongs in the folder for its job; only modules that fit in none are directly in the package."""
    files = sorted(path.name for path in (ROOT / package).glob("*.py"))
    assert "__init__.py" in files
    assert len(files) <= MOST_FILES, files


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_long(package: str) -> None:
    """One idea per file: a longer file has two."""
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in (ROOT / package).rglob("*.py")}
    assert len(lines) > 10
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count: they hide a cycle, but do not break it."""
    graph = grimp.build_graph(*PACKAGES, include_external_packages=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "chatterm.backends.backend" in imports["chatterm.app"]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("call", ["cuda.graph(", "cuda.synchronize("])
def test_recordings_and_waiting_for_a_gpu_take_turns(call: str) -> None:
    """CUDA refuses both while another thread records."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [path.relative_to(ROOT).as_posix() for path in files if call in path.read_text("utf-8")]
    assert found == ["engine/kernels/recording.py"]
