"""The library for every test of this folder, or a skip."""

import pytest

from engine import native
from engine.native import Library, Pool


@pytest.fixture(scope="session")
def library() -> Library:
    reason = native.problem()
    if reason is not None:
        pytest.skip(reason)
    return native.library()


@pytest.fixture(scope="session")
def pool(library: Library) -> Pool:
    return Pool(2, library)
