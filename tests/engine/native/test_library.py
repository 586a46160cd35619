"""Finding and loading the library, and how many threads it gets."""

import os
import sys
from pathlib import Path

import pytest

from engine.kernels.native import compile as compiling
from engine.kernels.native import library as native
from engine.kernels.native.library import (
    NativeError,
    NativeLibrary,
    Pool,
    default_threads,
    open_library,
    physical_cores,
)


def test_there_is_a_portable_variant_and_a_best_one(library: NativeLibrary) -> None:
    assert next(iter(library.variants)) == "portable"
    assert list(library.variants.values())[-1] == library.best
    assert set(library.variants) <= set(native.VARIANT_NAMES)
    assert library.best_name in native.VARIANT_NAMES.values()


def test_a_missing_library_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="not built"):
        open_library(tmp_path / "none.so")


def test_what_is_no_library_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "chatterm_native.so"
    path.write_bytes(b"not a library")
    with pytest.raises(NativeError, match="cannot be loaded"):
        open_library(path)


def test_a_library_of_other_sources_is_refused(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "source_hash", lambda: "another")
    with pytest.raises(NativeError, match="other sources"):
        open_library(Path(library.functions._name))


def test_no_compiler_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compiling.CompileError, match="C\\+\\+ compiler"):
        compiling.compile_library(tmp_path / "library.so")


def test_a_compiler_that_fails_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(compiling.CompileError, match="false failed"):
        compiling.compile_library(tmp_path / "library.so")
    assert not list(tmp_path.iterdir())


def test_one_core_is_left_to_the_screen_where_there_are_more_than_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, threads in ((1, 1), (2, 2), (3, 2), (8, 7)):
        monkeypatch.setattr(native, "physical_cores", lambda cores=cores: cores)
        assert default_threads() == threads


def test_physical_cores_are_within_what_the_process_may_use() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("text", "processors"),
    [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("nonsense", None), ("1 0", None)],
)
def test_the_quota_of_a_container(tmp_path: Path, text: str, processors: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert native._cgroup_processors(tmp_path / "cpu.max") == processors


def test_an_impossible_number_of_threads_is_refused(library: NativeLibrary) -> None:
    with pytest.raises(NativeError):
        Pool(100_000, library)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_is_refused_and_ends_in_peace(library: NativeLibrary) -> None:
    pool = Pool(2, library)
    child = os.fork()
    if child == 0:
        try:
            with pool.held():
                os._exit(1)
        except NativeError:
            del pool
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
