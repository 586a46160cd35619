"""A store in a temporary folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.sessions.store import SessionStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.db"


@pytest.fixture
def store(path: Path) -> Iterator[SessionStore]:
    opened = SessionStore.open(path)
    yield opened
    opened.close()
