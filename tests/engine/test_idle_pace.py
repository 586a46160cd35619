"""Idle chunks find the size that gives way in time, on whatever machine."""

import pytest

from engine.idle_pace import IDLE_SECONDS, IdlePace


def settled(first_row: float, further: float, most: int = 2048) -> tuple[IdlePace, list[float]]:
    """The pace after twelve chunks on a machine with these costs, and what the chunks took."""
    pace, took = IdlePace(), []
    for _ in range(12):
        took.append(first_row + further * (pace.rows - 1))
        pace.saw(pace.rows, took[-1], most, idle=True)
    return pace, took


@pytest.mark.parametrize("first_row", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("further", [0.0002, 0.02, 0.2, 0.6])
def test_a_chunk_takes_no_longer_than_a_person_may_wait(first_row: float, further: float) -> None:
    """The costs are parts of what a chunk may take."""
    pace, took = settled(first_row * IDLE_SECONDS, further * IDLE_SECONDS)
    assert all(seconds <= 1.3 * IDLE_SECONDS for seconds in took[3:]), took
    assert pace.rows == 2048 or took[-1] >= 0.3 * IDLE_SECONDS or pace.rows <= 2, (
        "nor much shorter than it may"
    )


def test_where_a_single_row_takes_longer_a_chunk_is_not_much_longer_than_that() -> None:
    pace, took = settled(0.8, 0.01)
    assert took[-1] <= 1.5 * 0.8 + 0.01
    assert pace.rows >= 16, "a step reads all weights, however few rows it has"


def test_a_tiny_chunk_does_not_make_the_next_one_overshoot() -> None:
    pace = IdlePace()
    pace.saw(3, 0.0001, 2048, idle=True)
    assert pace.rows == 6
    pace.saw(6, 0.3, 2048, idle=True)
    assert pace.rows == 1


def test_decoding_tells_what_a_row_takes_and_changes_nothing_else() -> None:
    pace = IdlePace()
    pace.saw(1, 0.02, 64, idle=False)
    pace.saw(500, 9.0, 64, idle=False)
    assert (pace.rows, pace.step_s) == (8, 0.02)
    pace.saw(64, 0.001, 64, idle=True)
    assert pace.rows == 64
