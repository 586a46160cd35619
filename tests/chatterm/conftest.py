"""No test reads or writes what belongs to the person who runs it, or asks the real Hub."""

from pathlib import Path

import pytest
from huggingface_hub import constants


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings and sessions lie in a folder of the test's own."""
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("CHATTERM_CONFIG", str(folder / "config.toml"))
    monkeypatch.setenv("CHATTERM_DATA", str(folder / "data"))
    monkeypatch.setenv("CHATTERM_RUNTIME", str(folder / "run"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of processes that a test starts
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder
