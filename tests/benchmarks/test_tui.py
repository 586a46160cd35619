"""benchmarks/tui.py: its arithmetic, and one short run with a real pseudo-terminal."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tui import LETTERS, MARK, Row, growth, pieces, quantile

ROOT = Path(__file__).parents[2]


def test_what_is_typed_stands_nowhere_in_what_is_said() -> None:
    said = "".join(pieces(random.Random(3), 2000))
    assert len(said) == 8000
    assert not set(LETTERS) & set(said)
    assert MARK not in said
    assert len(set(LETTERS)) == len(LETTERS)


def test_the_slowest_keys_count() -> None:
    assert quantile([*range(1, 101)], 0.99) == 99
    assert quantile([5.0], 0.99) == 5.0
    assert quantile([1.0] * 98 + [70.0, 80.0], 0.99) == 70.0


def test_memory_counts_from_a_fifth_of_the_tokens_on() -> None:
    assert growth([(0, 10**8), (20, 2 * 10**8), (100, 2 * 10**8 + 80_000)]) == (0.08, 1000.0)


def test_a_goal_is_met_or_missed() -> None:
    assert Row("a", 16.0, "ms", at_most=16).verdict == "met"
    assert Row("a", 16.1, "ms", at_most=16).verdict == "MISSED"
    assert Row("a", 19.0, "/s", at_least=20).verdict == "MISSED"
    assert (Row("a", 1.0, "s").verdict, Row("a", 1.0, "s").goal) == ("", "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_short_run(tmp_path: Path) -> None:
    found = tmp_path / "tui.json"
    arguments = ["--tokens", "800", "--answer", "800", "--messages", "20", "--json", str(found)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "tui.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "keystroke to frame, median" in done.stdout, done.stdout + done.stderr
    figures = json.loads(found.read_text())
    assert figures["keystrokes_ms"]
    assert figures["rows"]["first frame of the session"][0] > 0
