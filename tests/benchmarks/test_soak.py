"""A short soak, with and without slots, so that the long one can be trusted."""

import pytest
import torch

from benchmarks.shapes import SHAPES, random_engine
from benchmarks.soak import CONTEXT, soak
from tests.engine.fake_decoding import FakeRunner

OPTIONS = {
    "num_blocks": 20,
    "block_size": 8,
    "max_chunk": 64,
    "offload": 1 << 22,
    "threads": 1,
    "fused": False,
}


@pytest.mark.parametrize("slots", [0, 3])
def test_nothing_is_left_of_many_requests_at_once(slots: int) -> None:
    device = torch.device("cpu")
    with random_engine(SHAPES["tiny"], device=device, dtype=torch.float32, context=CONTEXT, **OPTIONS) as (
        engine,
        _,
    ):
        if slots:
            engine.loop.call(lambda: engine.engine_step.decode_with(FakeRunner(engine.pieces.runner, slots)))
        seen = soak(engine, 60, streams=6)
    assert seen.requests == 60
    assert seen.tokens > 200
    assert seen.cancelled > 0
    assert seen.preempted > 0


def test_a_leak_is_noticed() -> None:
    device = torch.device("cpu")
    with random_engine(SHAPES["tiny"], device=device, dtype=torch.float32, context=CONTEXT, **OPTIONS) as (
        engine,
        _,
    ):
        engine.loop.call(lambda: engine.pieces.blocks.reserve(engine.pieces.blocks.open([]), 1))
        with pytest.raises(AssertionError, match="held by nobody"):
            soak(engine, 4, streams=2)
