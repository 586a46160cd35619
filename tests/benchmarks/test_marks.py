"""The benchmark of marks takes them where it says, and opens tables at the marks that it means."""

from pathlib import Path

import pytest

from benchmarks.marks import disk_seconds, give_up, marks_after, opening_seconds
from benchmarks.restored import keep_on_disk, written
from engine import SamplingParams
from tests.engine.hybrid import hybrid_engine
from tests.engine.test_hybrid_engine import text


def test_an_answer_has_marks_after_as_many_rows_as_asked() -> None:
    for every, expected in ((0, set()), (64, {128}), (32, {128, 160})):
        with hybrid_engine() as engine, marks_after(every):
            list(engine.stream(text(1, 90), SamplingParams(temperature=0.0, max_tokens=80)))
            marks = engine.pieces.blocks.marks
            assert marks is not None
            assert {mark.row for mark in marks if mark.row % 32 == 0 and mark.row > 90} == expected


def test_a_state_comes_from_where_it_is_said_to_come_from(tmp_path: Path) -> None:
    prompt = text(2, 90)
    with hybrid_engine(offload=1 << 24) as engine:
        keep_on_disk(engine, tmp_path)
        engine.warm(prompt)
        written(engine, "marks", prompt)
        assert opening_seconds(engine, prompt) > 0
        give_up(engine, copies=True)
        assert opening_seconds(engine, prompt) > 0
        assert disk_seconds(engine, prompt) > 0
        give_up(engine, copies=False)
        with pytest.raises(RuntimeError, match="after 0 of 90"):
            opening_seconds(engine, prompt)
