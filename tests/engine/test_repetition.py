"""Answers that repeat themselves without end are ended; what only looks like that is not."""

from itertools import accumulate, count, takewhile
from pathlib import Path

import pytest

from engine import FinishReason, SamplingParams
from engine.schedule.repetition import FEWEST_REPEATS, FEWEST_TOKENS, LONGEST_PASSAGE, STRIDE, repeats
from tests.engine.tiny import tiny_engine
from tests.models.checkpoints import tiny_qwen3

LOOPING = SamplingParams(temperature=0.0, stop_repetition=True)


def noticed(ids: list[int], first: int = 0) -> int | None:
    """After how many tokens an answer would be ended; None: never."""
    return next((n for n in range(first + 1, len(ids) + 1) if repeats(ids[:n], first)), None)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 128, 129, LONGEST_PASSAGE])
def test_a_loop_is_noticed_soon_after_it_is_long_enough(size: int) -> None:
    before = [*range(1000, 1777)]
    # Passages that hold shorter repetition, as sentences do.
    passage = [0, 0, 1, 1, *range(2, size)][-size:]
    needed = len(before) + max(FEWEST_TOKENS, FEWEST_REPEATS * size)
    end = noticed(before + passage * (2 + 6000 // size))
    assert end is not None
    assert needed - len(passage) <= end <= needed + STRIDE


def test_a_loop_of_a_continued_answer_counts_anew() -> None:
    ids = [1, 2, 3] * 1000
    assert noticed(ids, first=1500) == 1500 + FEWEST_TOKENS


def lines(texts: list[str]) -> list[int]:
    """Texts in tokens: their characters."""
    return [ord(character) for text in texts for character in text]


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(lines([f"{n}, " for n in range(2000)]), id="counting"),
        pytest.param(lines(["I will not talk.\n"] * 60), id="a line asked for sixty times"),
        pytest.param(lines([f"| {n} | 0 | 0 | 0 |\n" for n in range(400)]), id="a table"),
        pytest.param(
            [*range(100), *[7] * (FEWEST_TOKENS - 1), *range(100)] * 3, id="zeros, and something else"
        ),
        pytest.param(
            [*takewhile(lambda n: n < 400_000, accumulate(count()))] * 7, id="seven times the same passage"
        ),
        pytest.param(
            lines([f"verse {n}\n" + "refrain, refrain!\n" * 4 for n in range(300)]),
            id="a poem with a refrain",
        ),
    ],
)
def test_what_only_looks_like_a_loop_goes_on(ids: list[int]) -> None:
    assert noticed(ids) is None


def test_an_answer_in_a_loop_ends_and_goes_on_for_as_long_again(tmp_path: Path) -> None:
    config = tiny_qwen3(vocab_size=272, max_position_embeddings=4096)
    with tiny_engine(tmp_path, config) as engine:
        loop = engine.tokenizer.encode("the same sentence; " * 300)
        chat = engine.chat()
        engine.scripted.script = list(loop)
        list(chat.send("go", LOOPING))
        assert chat.last.finish_reason is FinishReason.REPETITION
        size = len(chat.last.token_ids)
        assert chat.last.token_ids == loop[:size]
        assert FEWEST_TOKENS <= size < FEWEST_TOKENS + STRIDE
        engine.scripted.script = loop[size:]
        list(chat.resume(LOOPING))
        assert chat.last.finish_reason is FinishReason.REPETITION
        assert chat.last.token_ids == loop[: size + FEWEST_TOKENS]


def test_nothing_is_ended_unless_it_is_asked_for(tmp_path: Path) -> None:
    config = tiny_qwen3(vocab_size=272, max_position_embeddings=4096)
    with tiny_engine(tmp_path, config) as engine:
        engine.scripted.script = engine.tokenizer.encode("x" * 1200)
        events = list(engine.stream([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1200)))
        assert len(events) == 1200
