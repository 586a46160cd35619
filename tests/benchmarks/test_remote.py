"""benchmarks/remote.py: both clients get an answer, and what is printed is what was measured."""

import pytest

from benchmarks.remote import Times, answering, far, measured
from chatterm.backends.remote.address import found


def test_both_clients_are_timed_on_the_same_server() -> None:
    with answering(0.0) as text:
        address = found(text, {})
        assert address is not None
        kept = measured(address, turns=2)
        with far(address, 0.01) as behind:
            distant = measured(behind, turns=1, fresh=True)
    assert min(kept.raw_ms, kept.chatterm_ms, kept.round_trip_ms) > 0
    assert min(distant.raw_ms, distant.chatterm_ms, distant.round_trip_ms) >= 20


def test_what_is_printed() -> None:
    times = Times(raw_ms=2.0, chatterm_ms=3.0, round_trip_ms=0.5)
    assert times.added_ms == pytest.approx(1.0)
    assert "chatterm 3.00 ms, 1.00 ms more" in times.line()
