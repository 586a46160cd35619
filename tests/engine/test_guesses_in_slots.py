"""Guesses where sequences decode in slots: what is hoped for while tokens are unread, and what that costs."""

from engine.params import SamplingParams
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating
from engine.speculation.pace import MOST_ROWS, Pace
from tests.engine.schedule_world import World
from tests.engine.speculation import Oracle

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, speculation="auto")


def answered(wrong: float) -> tuple[World, Sequence, list[float]]:
    """A world whose engine knows its own pace, and an answer in it of which guesses are `wrong` so often."""
    world = World(1, 16, 0, ends=False, guesses=True)
    assert world.oracle is not None
    pace, waits = Pace(sizes=(1, 2, 4, 8)), list[float]()

    class Watched(Speculating):
        def waited(self, sequences: list[Sequence], seconds: float) -> None:
            hoped = [self._known[one].hoped.tokens for one in sequences]
            assert all(hoped), "there was hope for them"
            before = [self._known[one].balance.saved for one in sequences]
            Speculating.waited(self, sequences, seconds)
            waits.extend(b - self._known[one].balance.saved for b, one in zip(before, sequences, strict=True))

    world.oracle.random.random = lambda: wrong  # type: ignore[method-assign]
    world.oracle.random.randint = lambda low, high: high  # type: ignore[method-assign]
    world.engine_step.speculating = Watched(world.scheduler, pace, world.oracle)
    for context in (1, 2000):
        pace.turn_to(context)
        for _ in range(20):
            for rows in range(1, MOST_ROWS + 1):
                pace.costs.saw(rows, 1.0 + 0.01 * rows)
    request = world.arrive([1, 2, 3, 4], "person", PARAMS)
    world.finish()
    return world, request.sequence, waits


def test_a_hope_that_fails_costs_what_the_device_waited_for_it() -> None:
    _, sequence, waits = answered(wrong=1.0)
    assert sequence.accepted < 5  # by chance
    assert waits, "what was guessed first was another token, once all were read"
    assert all(cost > 0 for cost in waits)


def test_who_is_right_has_many_tokens_a_step() -> None:
    world, sequence, _ = answered(wrong=0.0)
    assert isinstance(world.oracle, Oracle)
    assert sequence.accepted > 15
