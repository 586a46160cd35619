"""The paced loop of benchmarks/stream.py: it measures a whole answer, and all of it is shown."""

import asyncio

import pytest

from benchmarks.stream import Repeats, answer_ids, on_screen, paced_engine, stream_rate, trained_tokenizer


def test_a_paced_answer_reaches_the_stream_and_the_screen() -> None:
    tokenizer = trained_tokenizer()
    engine = paced_engine(tokenizer, 200e-6)
    engine.script = answer_ids(tokenizer, 600, seed=1)
    assert len(engine.script) == 600
    ideal = 1 / 200e-6
    assert 0 < engine.bare(200) <= ideal * 1.01
    assert 0 < stream_rate(engine, tokenizer.encode("Hello"), 600) <= ideal * 1.01
    shown = asyncio.run(on_screen(engine, 600))
    assert shown.shown == shown.said
    assert shown.said.startswith("## 1. About")
    assert 0 < shown.rate <= shown.loop_rate * 1.01
    assert shown.frames >= 2


def test_ratios_compare_what_was_measured_side_by_side() -> None:
    found = Repeats(bare=[100, 50, 10], stream=[99, 50, 5], screen=[90, 40, 9], screen_loop=[95, 45, 9])
    summary = found.summary()
    assert summary["bare"] == 50
    assert summary["stream_ratio"] == pytest.approx(0.99)
    assert summary["screen_ratio"] == pytest.approx(0.9)
