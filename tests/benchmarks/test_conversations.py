"""Random conversations have the same tokens with guesses, and the benchmark would detect a difference."""

from collections.abc import Iterator

import pytest

from benchmarks.conversations import identical
from benchmarks.repeating import SENTENCE, repeating_engine
from benchmarks.speculation import given
from engine import Engine, SamplingParams
from engine.kernels.native import library as native
from engine.schedule import speculating
from engine.schedule.sequence import Sequence, SequenceStatus

WORDS = SENTENCE.split()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    with repeating_engine() as engine:
        yield engine


def test_random_conversations_have_the_same_tokens_with_guesses(engine: Engine) -> None:
    checked = identical(engine, 3, 0, WORDS)
    assert checked.tokens > 100
    assert 20 < checked.accepted < checked.guessed


@pytest.mark.parametrize("draft", [0, 1])
def test_they_have_the_same_tokens_with_a_draft_model(draft: int) -> None:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    with repeating_engine(draft=draft) as engine:
        checked = identical(engine, 3, 10, WORDS)
        assert "draft model" in engine.figures().speculation
        assert checked.drafted > 20
        assert (checked.accepted_drafts / checked.drafted > 0.5) is (draft == 0)
        assert engine.loop.call(lambda: engine.drafts.blocks.num_held) == 0


def test_a_row_that_counts_and_should_not_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(sequence: Sequence, guess: int) -> bool:
        return sequence.status is SequenceStatus.RUNNING and sequence.pending == 1

    monkeypatch.setattr(speculating, "_comes", always)
    with pytest.raises(SystemExit, match=r"seed \d+, step \d, .*: token \d+ is \d+, not \d+"):
        identical(engine, 10, 0, WORDS)


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_an_answer_can_be_given_whatever_is_drawn(engine: Engine, speculation: str) -> None:
    text = [*b"the same words again, the same words again, "]
    params = SamplingParams(temperature=0.0, max_tokens=2 * len(text), speculation=speculation)  # type: ignore[arg-type]
    with given(2 * text):
        assert [event.token_id for event in engine.stream(text, params)] == 2 * text
    assert [event.token_id for event in engine.stream(text, params)] != 2 * text
