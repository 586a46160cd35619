"""What was measured is known the next time, and nothing else is."""

from pathlib import Path

import pytest
import torch

from engine.machine.bandwidth import keep_bandwidth, known_bandwidth
from models.weights.slots import parameters
from tests.engine.tiny import tiny_engine

CPU = torch.device("cpu")


def test_a_measurement_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "new"))
    assert known_bandwidth(CPU) is None
    keep_bandwidth("cpu", 2e10)
    keep_bandwidth(CPU, 3e10)
    assert known_bandwidth(CPU) == 3e10
    assert known_bandwidth(CPU, 2) == 6e10
    with tiny_engine(tmp_path) as engine:
        figures = engine.figures()
        assert figures.bandwidth == 3e10
        unread = 0 if engine.spec.tied else engine.vocab_size * engine.spec.hidden_size
        numbers = figures.weight_bytes // parameters(engine.spec)
        assert figures.read_bytes == figures.weight_bytes - unread * numbers


@pytest.mark.parametrize("text", ["", "[]", '{"x": 1}', "\x00"])
def test_a_damaged_file_is_as_good_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path))
    (tmp_path / "bandwidth.json").write_text(text)
    assert known_bandwidth(CPU) is None
    keep_bandwidth(CPU, 1e10)
    assert known_bandwidth(CPU) == 1e10


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "file"))
    keep_bandwidth(CPU, 1e10)
    assert known_bandwidth(CPU) is None
