"""A chunk beside decoding finds the size that delays others little, on whatever machine."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Recorded, StepBatch
from engine.schedule.chunk_pace import (
    AIM,
    ATTENTION,
    DELAY_S,
    FEWEST,
    FIXED_S,
    ChunkPace,
    ChunkTimer,
    RowCost,
)
from engine.schedule.computing import Computing
from models.families.common import pre_norm_layer, uniform
from models.spec import Attention, Experts, FeedForward, Norm, Rope
from models.weights.slots import layer_parameters, parameters


def settled(cost: Callable[[int], float]) -> list[tuple[int, float]]:
    """The rows of some chunks on a machine where so many rows cost so much, and what they took, less the first."""
    pace, seen = ChunkPace(), []
    for _ in range(20):
        seen.append((pace.rows, cost(pace.rows)))
        pace.saw(pace.rows, pace.rows, seen[-1][1])
    return seen[10:]


@pytest.mark.parametrize("step", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("row", [5e-6, 1e-4, 3e-4])
def test_a_chunk_delays_others_by_20_ms_at_most(step: float, row: float) -> None:
    seen = settled(lambda rows: step + row * rows)
    assert all(seconds <= DELAY_S for _, seconds in seen), seen
    assert all(seconds >= 0.3 * DELAY_S for _, seconds in seen), seen


def test_where_a_row_is_dear_a_chunk_still_has_a_few() -> None:
    assert {rows for rows, _ in settled(lambda rows: 0.01 * rows)} == {FEWEST}


def test_a_short_prompt_says_nothing_of_long_ones_and_one_that_took_long_does() -> None:
    pace = ChunkPace()
    pace.saw(4096, 4096, 0.032)
    assert pace.rows == pytest.approx(4096 * (AIM * DELAY_S - FIXED_S) / (0.032 - FIXED_S), abs=1)
    before = pace.rows
    pace.saw(20, 20, 0.001)
    assert pace.rows == before
    pace.saw(1024, 1024, 0.032)
    assert FEWEST < pace.rows < 512


def test_what_a_chunk_may_have_and_may_cost_come_from_the_same_one() -> None:
    """Far into a long prompt rows cost more than they take, or less; where the next prompt begins, nobody knows."""
    pace = ChunkPace()
    pace.saw(500, 3000.0, AIM * DELAY_S)
    assert (pace.rows, pace.cost) == (500, 3000.0)
    pace.saw(490, 500.0, AIM * DELAY_S / 2)
    assert (pace.rows, pace.cost) == (980, 1000.0)


@given(
    fixed=st.floats(0, FIXED_S),
    row=st.floats(1e-6, 1e-3),
    stair=st.integers(1, 300),
    first=st.integers(64, 8192),
)
def test_no_chunk_after_one_that_was_measured_takes_longer_than_it_may(
    fixed: float, row: float, stair: int, first: int
) -> None:
    """Where so many rows more take a stair more, and chunks are cut there."""

    def seconds(rows: int) -> float:
        return fixed + row * -(-rows // stair) * stair

    pace, rows = ChunkPace(), -(-first // stair) * stair
    for _ in range(30):
        pace.saw(rows, rows, seconds(rows))
        rows = pace.rows // stair * stair or stair
        assert seconds(rows) <= max(DELAY_S, seconds(-(-FEWEST // stair) * stair))


def test_it_recovers_from_a_chunk_that_was_held_up() -> None:
    pace = ChunkPace(2048, 2048)
    pace.saw(2048, 2048, 3.0)
    assert pace.rows == FEWEST
    for _ in range(8):
        pace.saw(pace.rows, pace.rows, pace.rows * 1e-6)
    assert pace.rows >= 2048


@given(st.integers(1, 3), st.integers(1, 5000))
def test_rows_that_are_recorded(prompts: int, rows: int) -> None:
    recorded = Recorded((16, 64, 256), (128, 512))
    computed, whole = recorded.computed(prompts, rows), recorded.whole(prompts, rows)
    assert whole <= rows <= computed
    if whole:
        assert recorded.computed(prompts, whole) == whole
    assert recorded.whole(prompts, computed) == computed
    assert Recorded().computed(prompts, rows) == rows == Recorded().whole(prompts, rows)


@given(
    even=st.floats(10, 1e6),
    start=st.integers(0, 100_000),
    pieces=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
)
def test_what_rows_cost_does_not_depend_on_how_they_are_cut(
    even: float, start: int, pieces: list[int]
) -> None:
    at, total, row_cost = start, 0.0, RowCost(even)
    for rows in pieces:
        total += row_cost.cost(at, rows)
        at += rows
    whole = row_cost.cost(start, sum(pieces))
    assert total == pytest.approx(whole)
    assert sum(pieces) - 1 <= row_cost.rows(start, whole * (1 + 1e-9)) <= sum(pieces)
    assert row_cost.cost(start, row_cost.rows(start, whole)) <= whole * (1 + 1e-6)


def test_the_later_a_chunk_comes_in_a_long_prompt_the_fewer_rows_it_has() -> None:
    """Where attention to what is before costs more than the products, a chunk of as many rows would take far longer."""
    row_cost, pace, start, chunks = RowCost(4000), ChunkPace(), 0, []
    while start < 60_000:
        rows = min(row_cost.rows(start, pace.cost), pace.rows)
        took = 4e-6 * row_cost.cost(start, rows)
        pace.saw(rows, row_cost.cost(start, rows), took)
        chunks.append((rows, took))
        start += rows
    assert max(took for _, took in chunks) <= DELAY_S
    assert chunks[-2][0] < max(rows for rows, _ in chunks) / 4


def test_without_weights_per_row_of_context_all_rows_cost_the_same() -> None:
    assert RowCost().cost(10_000, 7) == 7
    assert RowCost().rows(10_000, 7.5) == 7


@pytest.mark.parametrize("shared", [None, FeedForward(48)])
def test_a_row_costs_what_the_experts_that_it_takes_cost(shared: FeedForward | None) -> None:
    """And not what all of them would: a chunk of an MoE prompt has far more rows of context than that says."""
    size, few, many = 24, 2, 16
    mixture = Experts(many, few, FeedForward(size), shared=shared)
    specs = [
        uniform(
            "Qwen3MoeForCausalLM",
            layers=3,
            vocab_size=32,
            hidden_size=16,
            max_positions=64,
            layer=pre_norm_layer(Attention(2, 1, 8, rope=Rope()), feed, Norm()),
            tied=True,
        )
        for feed in (mixture, FeedForward(few * size + (0 if shared is None else shared.size)))
    ]
    router = many * 16
    assert layer_parameters(specs[0]) == layer_parameters(specs[1]) + 3 * router
    numbers = 3 * 2 * 8
    assert RowCost.of(specs[0]).even == pytest.approx(
        RowCost.of(specs[1]).even + ATTENTION * 3 * router / (2 * numbers)
    )
    assert layer_parameters(specs[0]) < parameters(specs[0]) / 2


class FakeEvent:
    """Of a GPU on which chunks take what `seconds` says, and are done at once where it says so."""

    seconds = 0.0
    is_done = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * self.seconds


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "is_done", True)
    return FakeEvent


def test_a_chunk_is_told_of_once_it_is_done(events: type[FakeEvent], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    timer = ChunkTimer()
    monkeypatch.setattr(events, "is_done", False)
    events.seconds = 0.02
    for rows in (1000, 5):
        assert timer.of(lambda seconds, rows=rows: seen.append((rows, seconds)), lambda: "logits") == "logits"
    timer.read()
    assert seen == []
    monkeypatch.setattr(events, "is_done", True)
    timer.read()
    timer.read()
    assert seen == [(1000, 0.02), (5, 0.02)]


def test_a_chunk_that_was_recorded_says_nothing_of_the_next(
    events: type[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the pace would fall to a few rows whenever a graph is recorded, and more graphs would be for fewer rows."""
    seen: list[int] = []
    records = iter([1, 1, 0, 1, 0])
    runner: Any = SimpleNamespace(firsts=0)

    def run(batch: StepBatch) -> list[int]:
        runner.firsts += next(records)
        return [1]

    runner.run = run
    computing = Computing.__new__(Computing)
    computing.runner, computing.timer = runner, ChunkTimer()
    monkeypatch.setattr(Computing, "_saw", lambda _, prompts, disk, seconds: seen.append(len(prompts)))
    for number in range(5):
        assert computing._logits([Any] * number, StepBatch(()), None) == [1]
    computing.timer.read()
    assert seen == [2, 4]
