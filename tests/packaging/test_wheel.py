"""The results of `pip install`, `pipx install` and `python -m build` from a clean folder: an sdist, then a wheel."""

import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from engine.kernels.native import compile as compiling
from engine.kernels.native import library as native

ROOT = Path(__file__).parents[2]
LIBRARY = f"engine/kernels/native/{compiling.library_name()}"
MAN = "share/man/man1/chatterm.1"


def built(target: str, folder: Path, out: Path, **environment: str) -> Path:
    """Return the file that the build backend makes in `folder`, called as every installer calls it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains only the contents of the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", ROOT, folder / "out")) as archive:
        archive.extractall(folder, filter="data")
    (found,) = (path for path in folder.iterdir() if path.name != "out")
    return found


@pytest.fixture(scope="module")
def wheel(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = compiling.find_compiler()
    except compiling.CompileError as error:
        pytest.skip(str(error))
    if problem := native.problem():
        pytest.skip(problem)
    folder = tmp_path_factory.mktemp("wheel")
    # The same hook has compiled the installed library: here the sources are only read, and it is what they make.
    hurried = folder / "c++"
    link = f'for out; do :; done; exec cp {compiling.FOLDER / compiling.library_name()} "$out"'
    hurried.write_text(
        f'#!/bin/sh\ncase "$*" in *-mavx*) exit 1;; *-shared*) {link};; esac\nexec {compiler} "$@" -E\n'
    )
    hurried.chmod(0o755)
    return built("wheel", clean, folder / "out", CXX=str(hurried))


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_wheel_names_the_platform_and_has_what_runs(wheel: Path) -> None:
    assert wheel.name.startswith("chatterm-")
    assert "-py3-none-" in wheel.name
    assert wheel.stem.endswith(platform.machine())
    found = files_in(wheel)
    assert LIBRARY in found
    assert any(name.endswith(f".data/data/{MAN}") for name in found)
    for folder in ("chatterm", "engine", "models", "themes"):
        here = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
        here = {name for name in here if "__pycache__" not in name}
        assert here - found <= {LIBRARY}
    assert {name.partition("/")[0].partition("-")[0] for name in found} == {
        "chatterm", "engine", "models", "themes"
    }  # fmt: skip


def test_what_is_installed_from_it_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys, chatterm, engine.kernels.native.library as native\n"
        f"assert chatterm.__file__.startswith({str(tmp_path)!r}), chatterm.__file__\n"
        "assert native.problem() is None, native.problem()\n"
        "from chatterm.cli.main import main\n"
        "main(['--version'])"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("chatterm ")


def test_without_a_compiler_it_is_a_wheel_for_every_platform(clean: Path, tmp_path: Path) -> None:
    (clean / LIBRARY).unlink(missing_ok=True)
    found = built("wheel", clean, tmp_path / "out", CXX="", PATH="")
    assert found.name.endswith("-py3-none-any.whl")
    names = files_in(found)
    assert LIBRARY not in names
    assert "chatterm/cli/main.py" in names
