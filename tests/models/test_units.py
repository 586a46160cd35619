"""Amounts for people."""

import pytest

from models.units import bytes_text


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
