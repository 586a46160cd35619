"""Random schedules: whoever comes, goes, waits or is preempted, everybody gets the text that it gets alone.

After every step the invariants of blocks, queues and slots hold.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.params import Constraint, SamplingParams
from tests.engine.schedule_world import CONTEXT, World, needed_blocks
from tests.fresh import examples

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    seed=st.integers(0, 3),
    max_tokens=st.one_of(st.none(), st.integers(1, 20)),
    stop=st.sampled_from([(), (), ("#",), ("ab", "+")]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    constraint=st.sampled_from([None, None, Constraint("json_object")]),
)
ARRIVE = st.tuples(
    st.just("arrive"),
    st.integers(0, 2),
    st.integers(1, CONTEXT - 1),
    st.sampled_from(["person"] * 3 + ["idle"]),
    PARAMS,
)
OPS = st.one_of(
    ARRIVE,
    ARRIVE,
    st.tuples(
        st.just("warm"), st.integers(0, 2), st.integers(1, CONTEXT - 1), st.sampled_from(["person", "idle"])
    ),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("promote"), st.integers(0, 20)),
    st.tuples(st.just("evict"), st.integers(1, 6)),
    st.tuples(st.just("borrow"), st.integers(0, 2), st.integers(1, CONTEXT - 1), st.integers(1, 8)),
    st.tuples(st.just("pin"), st.integers(0, 2), st.integers(1, CONTEXT - 1)),
)


@pytest.mark.parametrize("slots", [0, 1, 3])
@examples(60, *HealthCheck)
@given(
    spare=st.integers(1, 12),
    host=st.sampled_from([0, 0, 5, 60]),
    ends=st.booleans(),
    window=st.sampled_from([None, None, 1, 2, 5, 6, 9, 14]),
    guesses=st.booleans(),
    ops=st.lists(OPS, max_size=30),
)
def test_everybody_finishes_with_the_text_it_gets_alone(
    slots: int,
    spare: int,
    host: int,
    ends: bool,
    window: int | None,
    guesses: bool,
    ops: list[tuple[Any, ...]],
) -> None:
    world = World(slots, needed_blocks(window) + spare, host, ends, window, guesses)
    for op in ops:
        world.do(*op)
    world.finish()
