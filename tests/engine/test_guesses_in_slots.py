"""Guesses where sequences decode in slots: what is hoped for while tokens are unread, and what that costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cache.rows import Rows
from engine.params import Constraint, SamplingParams
from engine.schedule.sequence import Priority, Sequence
from engine.schedule.speculating import Guessing, Speculating
from engine.speculation.cost_model import MOST_ROWS, CostModel
from engine.speculation.sources import NOTHING, Guess
from engine.speculation.texts import ConversationText
from tests.engine.schedule_world import World, output
from tests.engine.speculation import Eager, Oracle

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, speculation="auto")


@dataclass(slots=True)
class Knowing(Oracle):
    """Knows the answer; or has something to say while a token is unread, and nothing once it is read."""

    fickle: bool = False
    said: int = -1

    def guess(self, text: ConversationText, most: int) -> Guess:
        known = next(
            answer for answer in self.answers.values() if answer[: len(text.path)] == list(text.path)
        )
        again, self.said = self.said == len(text.path) - 1, len(text.path)
        if self.fickle and again:
            return NOTHING
        return Guess(tuple(known[len(text.path) :][:most]), 32)


@pytest.mark.parametrize("fickle", [False, True])
def test_who_is_right_has_many_tokens_a_step_and_a_hope_that_fails_costs_what_was_waited(
    fickle: bool,
) -> None:
    world = World(1, 16, 0, ends=False, guesses=True)
    oracle = world.oracle = Knowing(fickle=fickle)
    pace, waits = CostModel(sizes=(1, 2, 4, 8)), list[float]()

    class Watched(Speculating):
        def waited(self, sequences: list[Sequence], seconds: float) -> None:
            known = [self._known[one] for one in sequences]
            assert all(one.hoped.tokens for one in known)
            before = [one.balance.saved for one in known]
            Speculating.waited(self, sequences, seconds)
            waits.extend(b - one.balance.saved for b, one in zip(before, known, strict=True))

    world.engine_step.speculating = Watched(world.scheduler, pace, oracle)
    for context in (1, 2000):
        pace.turn_to(context)
        for _ in range(20):
            for rows in range(1, MOST_ROWS + 1):
                pace.costs.saw(rows, 1.0 + 0.01 * rows)
    sequence = world.arrive([1, 2, 3, 4], "person", PARAMS).sequence
    world.finish()
    if fickle:
        assert waits
        assert all(cost > 0 for cost in waits)
    else:
        assert sequence.accepted > 15
        assert not waits


@pytest.mark.parametrize("jumps", [False, True])
def test_guesses_of_an_answer_that_has_to_match_something_change_nothing(jumps: bool) -> None:
    """What is forced is computed as a prompt, which has other bits: at the same places with guesses and without."""
    said, guided = list[list[int]](), 0
    for guesses in (False, True):
        for seed in range(12):
            world = World(1, 16, 0, ends=True, guesses=guesses)
            world.engine_step.jumps = jumps
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=30, constraint=Constraint("regex", ".")
            )
            if guesses:
                assert world.oracle is not None
                world.oracle.answers[seed] = [1, 2, 3, seed, *said[seed]]
            sequence = asked(world, [1, 2, 3, seed], params, guesses)
            for _ in range(200):
                world.step()
            assert sequence.finished.is_set()
            assert sequence.error is None
            if guesses:
                assert sequence.generated == said[seed], f"seed {seed}"
                assert world.engine_step.decoding is not None
                runner: Any = world.engine_step.decoding.runner
                guided += runner.guided
            else:
                said.append(sequence.generated)
    assert guided > 20


def asked(world: World, prompt: list[int], params: SamplingParams, guesses: bool) -> Sequence:
    """As `World.arrive`, whatever the answer will be."""
    params = replace(params, speculation="auto" if guesses else "off")
    sequence = Sequence(Rows.of(prompt), Priority.PERSON, params, output(params))
    world.scheduler.add(sequence)
    return sequence


@dataclass
class Drafts:
    """In place of a draft model: knows the answers, and now and then something else; may fail."""

    answers: list[list[int]]
    fails: bool = False
    asked: int = 0
    told: str = "draft model of a test"
    nbytes: int = 0
    copied_bytes: int = 0
    cost: float = 0.1

    def guess(
        self, asked: Any, goes_on: Callable[[int, Guess, int], bool], saw: Callable[[int, float], None]
    ) -> list[Guess]:
        self.asked += 1
        if self.fails and self.asked > 3:
            raise RuntimeError("out of luck")
        if self.asked == 2:
            return [NOTHING for _ in asked]  # it reads
        found = []
        for at, one in enumerate(asked):
            assert not one.whom.unread
            assert one.drawing.said == len(one.whom.generated)
            known = next(answer for answer in self.answers if answer[: len(one.tokens)] == list(one.tokens))
            coming, guess = known[len(one.tokens) :][: one.most], NOTHING
            while len(guess.tokens) < len(coming) and goes_on(at, guess, len(asked)):
                token = coming[len(guess.tokens)] if self.asked % 3 else 0
                guess = Guess((*guess.tokens, token), chances=(*guess.chances, 0.9))
            found.append(guess)
        saw(len(asked), 0.01)
        return found

    def end(self, whom: object) -> None:
        pass

    def wish(self, tokens: object) -> None:
        pass

    def while_idle(self) -> bool:
        return False


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_a_draft_model_is_asked_once_all_tokens_are_read(eager: bool, fails: bool) -> None:
    """And what it was waited for is no part of what checking took."""
    world = World(3, 40, 0, ends=False, guesses=True)
    assert world.oracle is not None
    pace = Eager() if eager else CostModel(sizes=(1, 2, 4, 8))
    drafts = Drafts([], fails)
    if not eager:
        pace.turn_to(1)
        for _ in range(20):
            for rows in range(1, MOST_ROWS + 1):
                pace.costs.saw(rows, 1.0 + 0.01 * rows)
    speculating = Speculating(world.scheduler, pace, drafts=drafts)
    world.engine_step.speculating = speculating
    requests = [world.arrive([1, 2, 3, number], "person", PARAMS) for number in range(2)]
    drafts.answers += world.oracle.answers.values()
    world.finish()  # compares
    drafted = sum(request.sequence.drafted for request in requests)
    accepted = sum(request.sequence.drafts_accepted for request in requests)
    assert drafts.asked > 3
    assert 0 < accepted < drafted or fails
    assert bool(speculating.notes) is fails


def test_a_step_teaches_about_the_guess_that_it_checked_though_there_is_a_later_one() -> None:
    """The end of a step is known only when the next one begins, whose guesses are chosen before."""
    scheduler = SimpleNamespace(tally=SimpleNamespace(guessed_tokens=0, accepted_tokens=0))
    speculating = Speculating(scheduler, CostModel(sizes=(1, 2, 4, 8)))  # type: ignore[arg-type]
    answer = Sequence(Rows.of([1]), Priority.PERSON, PARAMS)
    for _ in range(20):
        speculating.pace.costs.saw(1, 0.01)
    assert speculating.pace.costs.unit_s
    known = speculating._known[answer] = Guessing(
        ConversationText(None), guess=Guess((1, 2, 3), chances=(0.9, 0.9, 0.9))
    )
    before = replace(speculating.pace.acceptance.drafted)
    speculating.checked(answer, 3, 3)
    known.guess = Guess((4,), chances=(0.1,))
    speculating.saw([(answer, 3, 3)], 0.011)
    assert (answer.drafted, answer.drafts_accepted) == (3, 3)
    assert speculating.pace.acceptance.drafted.hoped > before.hoped
