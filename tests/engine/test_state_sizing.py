"""The memory of networks with recurrent layers: states and log beside K and V."""

import pytest
import torch

from engine.cache.kv_needs import BRANCH_PART, MOST_MARKS, STREAM_STATES, KVNeeds, kv_needs
from engine.cache.marks import LOG_ROWS
from engine.cache.sizing import plan_kv
from engine.errors import OutOfRoomError
from models.recurrences import DeltaNet
from models.spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope

GIB = 1 << 30
NET = Layer(DeltaNet(16, 32, 128, 128), FeedForward(9216))
PLAIN = Layer(Attention(16, 4, 256, rope=Rope()), FeedForward(9216))
SPEC = ModelSpec("Qwen3.5-4B", 248_320, 2560, 262_144, (NET, NET, NET, PLAIN) * 8, Norm())


def needs(step: int = 512) -> KVNeeds:
    return kv_needs(SPEC, torch.bfloat16, step=step)


def test_a_state_takes_as_much_as_1536_tokens() -> None:
    found = needs()
    (log,) = found.groups
    assert (log.window, log.tail, len(log.layers)) == (LOG_ROWS + 3, 3, 24)
    assert log.token_bytes == 24 * (2 * 16 * 128 + 32 * 128 + 2 * 32) * 2
    assert found.token_bytes == 8 * 2 * 4 * 256 * 2
    assert found.state_bytes == 24 * 32 * 128 * 128 * 4 == 1536 * found.token_bytes


@pytest.mark.parametrize("free", [2, 4, 8, 16, 40])
@pytest.mark.parametrize("streams", [1, 8])
def test_states_take_a_quarter_of_the_memory_at_most(free: int, streams: int) -> None:
    plan = plan_kv(needs(), free * GIB, SPEC.max_positions, 8192, 1.0, streams=streams)
    most = STREAM_STATES * streams + MOST_MARKS
    taken = plan.states * plan.needs.state_bytes
    assert STREAM_STATES <= plan.states <= most
    assert taken <= free * GIB // BRANCH_PART
    assert plan.states == most or taken + plan.needs.state_bytes > free * GIB // BRANCH_PART
    assert plan.nbytes <= free * GIB
    assert plan.context_length == 8192


def test_too_little_memory_for_states_is_told() -> None:
    with pytest.raises(OutOfRoomError, match=r"a context of 8,192 tokens needs \d+ MB for its KV cache"):
        plan_kv(needs(), GIB // 4, SPEC.max_positions, 8192, 1.0)
