"""The library for every test of this folder, or a skip."""

import os
from pathlib import Path

import pytest

from engine.kernels.native import library as native
from engine.kernels.native.library import NativeLibrary, Pool

LIBRARY = "CHATTERM_TEST_LIBRARY"
"""Names another library to test than the installed one: test_sanitizers.py compiles it."""


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    if LIBRARY in os.environ:
        return native.open_library(Path(os.environ[LIBRARY]))
    reason = native.problem()
    if reason is not None:
        pytest.skip(reason)
    return native.library()


@pytest.fixture(scope="session")
def pool(library: NativeLibrary) -> Pool:
    return Pool(2, library)
