"""A tiny engine for every test of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.tiny import TinyEngine, tiny_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests of a module keep their checkpoint."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def engine(folder: Path) -> Iterator[TinyEngine]:
    with tiny_engine(folder) as engine:
        yield engine
