"""Idle chunks find the size that gives way in time, on whatever machine."""

from collections.abc import Callable

import pytest

from engine.schedule.idle_pace import IDLE_SECONDS, MOST_SECONDS, IdlePace


def settled(cost: Callable[[int], float], most: int = 2048) -> list[tuple[int, float]]:
    """The rows of thirty chunks on a machine where so many rows cost so much, and what they took, less the first."""
    pace, seen = IdlePace(), []
    pace.saw(1, cost(1), most, idle=False)
    for _ in range(30):
        seen.append((pace.rows, cost(pace.rows)))
        pace.saw(*seen[-1], most, idle=True)
    return seen[12:]


@pytest.mark.parametrize("first_row", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("further", [0.0002, 0.01, 0.05])
def test_a_chunk_takes_what_a_person_may_wait(first_row: float, further: float) -> None:
    """The costs are parts of what a chunk may take."""
    seen = settled(lambda rows: (first_row + further * (rows - 1)) * IDLE_SECONDS)
    assert all(seconds <= 1.4 * IDLE_SECONDS for _, seconds in seen), seen
    assert all(rows == 2048 or seconds >= 0.6 * IDLE_SECONDS for rows, seconds in seen), seen


def test_it_does_not_stay_on_a_low_stair() -> None:
    """Two rows take three times as long as one, and sixteen hardly longer than two."""
    seen = settled(lambda rows: 0.006 if rows == 1 else 0.018 + 0.0001 * rows)
    assert min(rows for rows, _ in seen) >= 14


def test_a_few_rows_at_once_where_one_takes_nearly_as_long() -> None:
    seen = settled(lambda rows: 0.03 + 0.0005 * rows)
    assert {rows for rows, _ in seen} == {16}
    seen = settled(lambda rows: 0.8 + 0.01 * (rows - 1))
    assert min(rows for rows, _ in seen) >= 8, "a step reads all weights, however few rows it has"


def test_where_every_row_is_dear_chunks_are_small() -> None:
    rows = [rows for rows, _ in settled(lambda rows: 0.03 * rows)]
    assert rows.count(1) >= len(rows) - 2
    assert max(rows) <= 2
    seen = settled(lambda rows: 0.02 + 0.005 * rows)
    assert all(0.5 * MOST_SECONDS < seconds <= MOST_SECONDS for _, seconds in seen), seen


@pytest.mark.parametrize("slowest", [0.05, 0.2])
def test_a_row_alone_is_no_end_after_steps_that_were_disturbed(slowest: float) -> None:
    pace = IdlePace()
    for rows in (8, 2, 1):
        pace.saw(rows, slowest, 2048, idle=True)
    seen = []
    for _ in range(60):
        seen.append((pace.rows, 0.045 + 0.0035 * (pace.rows - 1)))
        pace.saw(*seen[-1], 2048, idle=True)
    assert all(rows >= 6 and seconds <= 0.075 for rows, seconds in seen[30:]), seen


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
