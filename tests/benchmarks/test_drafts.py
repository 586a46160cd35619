"""The measured rate of drafts is the one that the cost model predicts, on a machine where the model is true."""

from dataclasses import dataclass, field
from random import Random
from typing import Literal

import pytest

from benchmarks import drafts
from benchmarks.drafts import Said, Varying, at, chain_of, costs_of, expected_gain, step_of
from engine.speculation.cost_model import AGAIN, LEAST_GAIN, MOST_ROWS, Balance, CostModel
from engine.speculation.sources import NOTHING, Guess

ROW, START, DRAFT, BETWEEN = 0.1, 0.05, 0.2, 0.1
"""What one more row takes, a chain besides its steps, one of its steps, and what a token takes between the steps; all
in steps of one row."""
UNIT_S = 0.03


@dataclass(slots=True)
class Machine:
    """Gives answers of `tokens` tokens with a draft model, and is slower for a while now and then."""

    tokens: int
    acceptance: float = 1.0
    random: Random = field(default_factory=lambda: Random(0))
    answers: int = 0

    def ask(self, how: Literal["off", "draft"], pace: CostModel) -> Said:
        self.answers += 1
        unit_s, said, steps = UNIT_S * (1 + (self.answers - 2) // 3 % 2), 0, list[tuple[str, float]]()
        guessed = accepted = 0
        while said < self.tokens:
            pace.turn_to(100)
            guess = NOTHING
            if how == "draft" and not pace.measures:
                while pace.drafts_more(guess, 1, 1.0, self.tokens - said - 1, 1, LEAST_GAIN):
                    guess = Guess((*guess.tokens, 0), chances=(*guess.chances, self.acceptance))
                    pace.costs.drafted(1, unit_s * DRAFT)
            if count := len(guess.tokens):
                pace.costs.drafted(0, unit_s * START)
                steps.append((chain_of(count), unit_s * (START + count * DRAFT)))
            checked = pace.count(guess, 1, 1.0, pace.drafts, said, spent=START + count * DRAFT)
            held = next((at for at in range(checked) if self.random.random() >= self.acceptance), checked)
            steps.append((step_of(1 + checked), unit_s * (1 + ROW * checked)))
            pace.costs.saw(1 + checked, steps[-1][1])
            pace.acceptance.saw(guess, checked, held)
            if not count:
                pace.relax()
            said, guessed, accepted = said + 1 + held, guessed + checked, accepted + held
        spent_s = sum(seconds for _, seconds in steps) + unit_s * BETWEEN * said
        return Said([7] * said, spent_s / said, guessed, accepted, steps)


def test_all_numbers_of_guesses_are_tried() -> None:
    pace, seen = Varying(), set[int]()
    for _ in range(200):
        pace.turn_to(100)
        guess = NOTHING
        while pace.drafts_more(guess, 1, 1.0, MOST_ROWS - 1, 1, 0.0):
            guess = Guess((*guess.tokens, 0), chances=(*guess.chances, 0.1))
        assert pace.best(guess, 1, 1.0, Balance(), 0)[1] == len(guess.tokens)
        seen.add(len(guess.tokens))
    assert seen == set(range(MOST_ROWS))


def test_the_expected_gain_is_that_of_the_best_number() -> None:
    costs = {step_of(rows): 1 + ROW * (rows - 1) for rows in range(1, MOST_ROWS + 1)}
    costs |= {chain_of(count): START + DRAFT * count for count in range(1, MOST_ROWS)}
    assert expected_gain(costs, 0.1, AGAIN) == (1.0, 0)
    gain, best = expected_gain(costs, 0.8, AGAIN)
    steps = {
        count: sum(0.8**n for n in range(1 + count)) / (1 + ROW * count + START + DRAFT * count)
        for count in range(1, 8)
    }
    assert best == max(steps, key=steps.__getitem__)
    assert 0.97 * steps[best] < gain < steps[best], "now and then a step has no guesses"


def test_turns_that_were_disturbed_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 0.5, 0.5, 0.0, 0.05])
    monkeypatch.setattr(drafts, "others", lambda before, after: next(busy))
    machine = Machine(60)
    found = at(machine.ask, machine, Varying(draft=DRAFT), [7] * 60, 0.0, 3)
    assert found["repeated"] == 2
    assert machine.answers == 3 * 5


@pytest.mark.parametrize("rate", [0.9, 0.7, 0.5])
def test_the_measured_rate_is_the_expected_one(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "others", lambda before, after: 0.0)
    machine, trying = Machine(400), Varying(draft=DRAFT)
    plain = machine.ask("off", trying).tokens
    found = at(machine.ask, machine, trying, plain, rate, 8)
    assert found["off"] == pytest.approx(1 / (UNIT_S * 1.5 * (1 + BETWEEN)), rel=0.5)
    assert found["costs"] == pytest.approx([1 + ROW * more for more in range(MOST_ROWS)])
    assert found["chains"] == pytest.approx([START + DRAFT * count for count in range(1, MOST_ROWS)])
    assert 0.93 < found["of expected"] < 1.07


def test_costs_are_in_steps_of_the_answer_just_before() -> None:
    def said(slower: float) -> tuple[Said, Said]:
        off, tried = [(step_of(1), 0.1)] * 3, [(step_of(1), 9.9), (chain_of(2), 0.05), (step_of(3), 0.15)]
        return tuple(
            Said([1, 2, 3], 0.1, 0, 0, [(kind, slower * s) for kind, s in steps]) for steps in (off, tried)
        )  # type: ignore[return-value]

    assert costs_of([said(1), said(5), said(3)]) == pytest.approx(
        {"1 rows": 1.0, "chain of 2": 0.5, "3 rows": 1.5}
    )
