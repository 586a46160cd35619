"""Short prompts of networks with recurrences in steps of a fixed size, in fp32 and in Triton's interpreter."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.attention.triton import TritonBackend
from engine.batch import NONE, Span, StateMoves, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda import padded_prefill, padded_walks
from engine.execute.cuda.padded_prefill import PaddedPrefill
from engine.execute.cuda.padded_walks import SAVES
from engine.kernels.triton import prompt_attention
from engine.kernels.triton.prompt_attention import Tile
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


def moves_of(cuts: tuple[int, ...], marks: tuple[int, ...], at: int) -> StateMoves:
    """What the chunk number `at` of a prompt does: it goes on from the state after the one before, in slot 0, and
    leaves its own there; marks go to slot 1 and those after it."""
    start, stop = cuts[at : at + 2]
    saves = tuple((row, 1 + number) for number, row in enumerate(marks) if start < row < stop)
    return StateMoves(0 if start else NONE, start, (*saves, (stop, 0)))


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_prefill, "SLAB", 16)  # the interpreter is slow
    monkeypatch.setattr(padded_prefill, "ALONE", (16,))
    monkeypatch.setattr(prompt_attention, "choose_tile", lambda *_: Tile(16, 16, 4))


@pytest.mark.parametrize("most", [SAVES, 2])
def test_deterministic_prompts_have_the_same_bits_however_they_are_cut(
    network: Network, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The states, too, wherever they are saved: more of them than a step saves, and at the end of a slab."""
    small_steps(monkeypatch)
    for module in (padded_prefill, padded_walks):
        monkeypatch.setattr(module, "SAVES", most)
    marks, found = (4, 9, 16, 40), []
    for cuts in ((0, 50), (0, 3, 20, 41, 50), (0, 16, 50)):
        cache = cache_of(network)
        padded = PaddedPrefill(network, cache, None, 64, graphs=None)
        for at, (start, stop) in enumerate(pairwise(cuts)):
            given = span(TEXT, TABLE, start, stop, moves_of(cuts, marks, at))
            assert padded.takes((given,))
            (last,) = padded.run((given,))
        kept = [layer[[0, 1, 2, 4]] for layer in states(cache)]  # one of them lies between two chunks
        found.append([last.clone(), *kept, *(part.nan_to_num() for part in cache.parts)])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
    model, plain = Decoder(network), cache_of(network)
    whole = span(TEXT, TABLE, 0, 50, moves_of((0, 50), marks, 0))
    with torch.inference_mode():
        step = SdpaBackend(plain).plan(StepBatch((whole,)))
        expected = model.logits(model.forward(torch.tensor(TEXT), torch.arange(50), step))[-1]
    torch.testing.assert_close(found[0][0], expected, rtol=1e-4, atol=1e-4)
    for one, wanted in zip(found[0][1:], states(plain), strict=False):
        torch.testing.assert_close(one, wanted[[0, 1, 2, 4]], rtol=1e-4, atol=1e-4)


def test_a_deterministic_prompt_goes_on_from_any_row_of_the_log(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a state a row before it, and from one further back than a recorded step reads again."""
    small_steps(monkeypatch)
    monkeypatch.setattr(padded_walks, "replayed", lambda spans: 4)
    found = []
    for source, row in ((0, 40), (1, 39), (2, 7), (NONE, 0)):
        cache = cache_of(network)
        padded = PaddedPrefill(network, cache, None, 64, graphs=None)
        first = span(TEXT, TABLE, 0, 40, StateMoves(NONE, 0, ((7, 2), (39, 1), (40, 0))))
        padded.run((first,))
        (last,) = padded.run((span(TEXT, TABLE, 40, 50, StateMoves(source, row, ((45, 3), (50, 4)))),))
        found.append([last.clone(), *(layer[[3, 4]] for layer in states(cache))])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
