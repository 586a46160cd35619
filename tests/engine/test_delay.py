"""A long prompt delays nobody's next token by more than 20 ms, whatever a GPU takes: the engine's step on its clock."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Recorded
from engine.schedule.chunk_pace import ATTENTION, DELAY_S, RowCost
from tests.engine.gpu_clock import Machine, Served
from tests.fresh import examples

EVEN = 4000.0
"""What the engine believes (see `RowCost`)."""
RECORDED = Recorded((16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024), (128, 256, 512, 1024, 2048))


def machines_of(recorded: Recorded, launching: float) -> st.SearchStrategy[Machine]:
    """Where what is not recorded takes the host up to `launching` seconds."""
    return st.builds(
        Machine,
        decode=st.floats(0.0005, 0.01),
        fixed=st.floats(0.0002, 0.006),
        row=st.floats(1e-6, 4e-5),
        # Attention gets from half the FLOPs of products to many times as many.
        even=st.floats(EVEN * 0.5 / ATTENTION, 10 * EVEN),
        launching=st.floats(0.0003, launching),
        recorded=st.just(recorded),
    )


machines = machines_of(Recorded(), 0.012) | machines_of(RECORDED, 0.04)
arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.one_of(st.integers(1, 2000), st.integers(2000, 16_384))),
    min_size=1,
    max_size=5,
)
"""Steps after the one before, and rows."""


def served(machine: Machine, prompts: list[tuple[int, int]], alone: int, streams: int) -> tuple[float, float]:
    """Seconds by which prompts delay the tokens of `streams`, and until all their first ones are there.

    A prompt of `alone` rows came before anybody decoded.
    """
    engine = Served(machine, RowCost(EVEN))
    with patch("torch.cuda.Event", engine.clock.event()):
        if alone:
            engine.run(engine.arrive(alone, 1).finished.is_set)
        others = [engine.arrive(64, 100_000) for _ in range(streams)]
        told = engine.runner.told

        def more(count: int) -> None:
            wanted = [len(told.get(other, [])) + count for other in others]
            engine.run(lambda: all(len(told.get(o, [])) >= n for o, n in zip(others, wanted, strict=True)))

        more(10)
        began = engine.clock.host
        more(10)
        arrived, waiting = engine.clock.host, []
        for steps, rows in prompts:
            more(steps)
            waiting.append(engine.arrive(rows, 3))
        engine.run(lambda: all(prompt.finished.is_set() for prompt in waiting))
        more(5)
    quiet = max(engine.gaps(others, began, arrived))
    beside = max(engine.gaps(others, arrived, engine.clock.host))
    return beside - quiet, max(told[prompt][0] for prompt in waiting) - arrived


@examples(25)
@given(machines, arrivals, st.sampled_from([0, 100, 3000, 16_384]), st.integers(1, 4))
def test_prompts_delay_nobody_by_more_than_20_ms(
    machine: Machine, prompts: list[tuple[int, int]], alone: int, streams: int
) -> None:
    """The first ones that come included, and those that wait for another one."""
    assert served(machine, prompts, alone, streams)[0] <= DELAY_S


@examples(10)
@given(machines, st.sampled_from([0, 16_384]))
def test_a_prompt_takes_little_longer_than_it_would_in_chunks_of_20_ms(machine: Machine, alone: int) -> None:
    rows = 16_384
    _, seconds = served(machine, [(0, rows)], alone, 1)
    work = machine.row * (rows + rows * rows / 2 / machine.even)
    chunks = max(work / (DELAY_S - machine.fixed), 1)
    best = work + chunks * (machine.fixed + machine.decode)
    assert seconds <= 1.5 * best + 0.25
