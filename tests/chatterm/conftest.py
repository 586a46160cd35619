"""No test reads or writes what belongs to the person who runs it."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings and sessions lie in a folder of the test's own."""
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("CHATTERM_CONFIG", str(folder / "config.toml"))
    monkeypatch.setenv("CHATTERM_DATA", str(folder / "data"))
    return folder
