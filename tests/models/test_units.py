"""Amounts as displayed; no code writes a plural by hand, because it would one day say "1 tokens"."""

import re
from pathlib import Path

import pytest

from models.units import bytes_text, counted

_BY_HAND = re.compile(
    r"[:\w)\]]\} (?:(?!in )\w+ )?(?:tokens|messages|blocks|characters|turns|branches|sessions|matches)\b"
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (61_400, "61 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (2_500_000, "2.5 MB"),
        (9_949_999, "9.9 MB"),
        (9_950_000, "10 MB"),
        (98_362_432, "98 MB"),
        (1_250_000_000, "1.2 GB"),
        (3.2e15, "3200 TB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_one_is_singular() -> None:
    assert counted(1, "token") == "1 token"
    assert counted(0, "token") == "0 tokens"
    assert counted(1204, "token") == "1,204 tokens"
    assert counted(2, "branch") == "2 branches"
    assert counted(1, "branch") == "1 branch"


def test_counts_are_written_by_counted() -> None:
    written = [
        f"{file}: {line.strip()}"
        for file in sorted(Path("chatterm").rglob("*.py"))
        for line in file.read_text().splitlines()
        if _BY_HAND.search(line)
    ]
    assert written == []
