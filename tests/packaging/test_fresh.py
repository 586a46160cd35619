"""What the tests draw: the same for everybody and every time, and something new only where that is asked for."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from engine.cache.rows import Rows
from engine.params import SamplingParams
from engine.schedule.sequence import Priority, Sequence
from tests.fresh import FRESH

TESTS = Path(__file__).parents[1]
USUAL = pytest.mark.skipif(FRESH > 0, reason="new examples were asked for")


@USUAL
@pytest.mark.parametrize("time", [1, 2])
def test_every_test_draws_from_the_start(time: int) -> None:
    assert random.random() == random.Random(0).random()
    assert np.random.random() == np.random.RandomState(0).random_sample()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    assert Sequence(Rows.of([1]), Priority.IDLE, SamplingParams()).seed == random.Random(0).getrandbits(63)


@USUAL
def test_everybody_tries_the_same_examples_however_long_they_take() -> None:
    assert settings().derandomize
    assert settings().database is None
    assert settings().deadline is None


@pytest.mark.parametrize(("asked", "told"), [("", "9 0 9"), ("3:70", "3 70 73")])
def test_new_ones_are_as_many_as_asked(asked: str, told: str) -> None:
    program = "from tests.fresh import *; print(examples(9).max_examples, seeds(9).start, seeds(9).stop)"
    environment = os.environ | {"CHATTERM_FRESH": asked}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent)
    assert done.stdout.strip() == told


def test_what_failed_says_how_to_run_it_again() -> None:
    names = ["tests/test_a.py::test_b[True-72]", "tests/test_a.py::test_c[7]"]
    program = f"from tests.fresh import *; print(*runs_again({names}), sep=chr(10))"
    environment = os.environ | {"CHATTERM_FRESH": "3:70"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent)
    assert done.stdout.splitlines() == [f"CHATTERM_FRESH=1:72 pytest '{names[0]}'"]


def test_no_test_says_for_itself_how_many_examples_it_tries_or_draws_without_a_seed() -> None:
    own = re.compile(r"max_examples=|derandomize=|\bRandom\(\)|default_rng\(\)|SystemRandom")
    known = {TESTS / "fresh.py", TESTS / "conftest.py", Path(__file__)}
    files = set(TESTS.rglob("*.py")) - known
    assert len(files) > 300
    assert [path.name for path in sorted(files) if own.search(path.read_text("utf-8"))] == []
