"""Short prompts of networks with recurrences in steps of a fixed size, in fp32 and in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.attention.triton import TritonBackend
from engine.batch import NONE, Span, StateMoves, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.padded_prefill import PaddedPrefill
from engine.execute.cuda.padded_walks import SAVES
from models.network import Network
from models.reference.decoder import Decoder
from tests.engine.hybrid import hybrid_network
from tests.engine.kernels.test_delta_steps import SPECS, cache_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_recurrence.py has engines")

TEXT, OTHER = (
    torch.randint(272, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    for count in (50, 20)
)
TABLE, OTHER_TABLE = (7, 1, 3, 2), (5, 0)


def span(text: list[int], table: tuple[int, ...], start: int, stop: int, moves: StateMoves) -> Span:
    return Span(table, start, stop - start, text[start:stop], range(start, stop), wanted=1, states=moves)


STEPS = (
    (span(TEXT, TABLE, 0, 21, StateMoves(NONE, 0, ((12, 3), (21, 0)))),),
    (
        span(TEXT, TABLE, 21, 49, StateMoves(3, 12, ((30, 4), (49, 1)))),
        span(OTHER, OTHER_TABLE, 0, 20, StateMoves(NONE, 0, ((20, 2),))),
    ),
    (span(TEXT, TABLE, 49, 50, StateMoves(4, 30, ((50, 4),))),),
)
"""A prompt; what follows it, from an earlier state and beside another; and one more row."""


@pytest.fixture(scope="module", params=["usual", "mamba", "groups", "halves", "beside"])
def network(request: pytest.FixtureRequest) -> Network:
    return hybrid_network(SPECS[request.param])


def states(cache: KVCache) -> list[Tensor]:
    assert cache.states is not None
    return [layer[:5] for layer in cache.states.layers.values()]


def test_padded_steps_give_the_logits_and_states_of_the_reference(network: Network) -> None:
    plain, cache = cache_of(network), cache_of(network)
    padded, model = PaddedPrefill(network, cache, TritonBackend(cache), 100, graphs=None), Decoder(network)
    with torch.inference_mode():
        for step in STEPS:
            assert padded.takes(step)
            ids = torch.tensor([token for each in step for token in each.tokens])
            rows = torch.tensor([row for each in step for row in each.positions])
            hidden = model.forward(ids, rows, SdpaBackend(plain).plan(StepBatch(step)))
            last = torch.tensor([each.count for each in step]).cumsum(0) - 1
            expected = model.logits(hidden[last])
            torch.testing.assert_close(torch.stack(padded.run(step)), expected, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(states(cache), states(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_steps_that_walk_too_far_or_save_too_often_are_not_recorded(network: Network) -> None:
    cache = cache_of(network)
    padded = PaddedPrefill(network, cache, TritonBackend(cache), 1000, graphs=None)
    blocks = tuple(range(20))

    def takes(row: int, saves: int, others: int = 0) -> bool:
        moves = StateMoves(0, row, tuple((201 + at, 1) for at in range(saves)))
        one = Span(blocks, 200, 100, states=moves)
        return padded.takes((one, *[Span(blocks, 0, 1, states=StateMoves(NONE, 0, ()))] * others))

    assert takes(72, SAVES)
    assert not takes(71, 1)
    assert takes(71, 1, others=1)
    assert not takes(200, SAVES + 1)
    assert takes(200, 1, others=31)
    assert not takes(200, 1, others=32), "it would have to be cut"
