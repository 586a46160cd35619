"""benchmarks/remote.py: both clients get an answer, and what is printed is what was measured."""

import pytest

from benchmarks.remote import Times, answering, measured
from chatterm.backends.remote.address import found


def test_both_clients_are_timed_on_the_same_server() -> None:
    with answering(0.0) as text:
        address = found(text, {})
        assert address is not None
        times = measured(address, turns=2)
    assert min(times.raw_ms, times.chatterm_ms, times.round_trip_ms) > 0


def test_what_is_printed() -> None:
    times = Times(raw_ms=2.0, chatterm_ms=3.0, round_trip_ms=0.5)
    assert times.added_ms == pytest.approx(1.0)
    assert "chatterm 3.00 ms, 1.00 ms more" in times.line()
