"""The parts of the guess benchmarks: answers that copy, and the worth of guesses."""

from dataclasses import replace

import pytest
import torch

from benchmarks import guesses
from benchmarks.copying import copied
from benchmarks.replayed import Replayed, Worth, worth
from benchmarks.shapes import SHAPES
from engine.kernels.native import library as native
from engine.speculation.suffixes import GRAM


def test_what_a_guess_was_worth_is_known_for_each_token_and_can_be_replayed() -> None:
    prompt, answer = copied(1000, 60, 40, 10, 0)
    found = worth([*prompt, *answer], len(prompt))
    assert len(found) == len(answer)
    # A change comes after the ninth token; from the third one on its copy is known, behind the change, too.
    assert [one.held for one in found[:12]] == [0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 9, 8]
    assert [bool(one.guessed) for one in found[:14]] == [False] * GRAM + [True] * (14 - GRAM)
    texts = Replayed(answer=[*prompt, *answer], prompt=len(prompt), worth=found)
    text = texts.take(None, prompt)
    text.go_on(answer[:5])
    guess = texts.guess(text, 7)
    assert len(guess.tokens) == 7
    assert list(guess.tokens[:4]) == answer[5:9]
    assert guess.tokens[4] != answer[9]
    assert found[5] == Worth(16, 4, guess.length, guess.agreed)


def test_weights_that_copy_say_what_they_are_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(guesses, "DTYPE", torch.float32)
    monkeypatch.setitem(guesses.SHAPES, "tiny", replace(SHAPES["tiny"], vocab_size=4096))
    (found,) = guesses.measure_copies("tiny", [100], [30], 1, torch.device("cpu")).values()
    assert found["tokens a step"] >= 1.0
    assert "one in 30 is changed: off" in capsys.readouterr().out
