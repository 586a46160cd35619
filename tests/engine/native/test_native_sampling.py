"""Tokens that the native kernels draw, beside the plain sampler."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.native import library as native
from engine.params import SamplingParams
from engine.sampling.sampler import SamplerState, allowed, choices, likeliest, masked, penalise, sample

pytestmark = pytest.mark.skipif(native.problem() is not None, reason="there are no native kernels here")


def token(variant: int, logits: Tensor, params: SamplingParams, chance: float) -> int:
    how, _room = drawing(params, len(logits))
    how.chance = chance
    return int(native.library().functions.ct_sample(variant, logits.data_ptr(), how))


def drawing(params: SamplingParams, vocab: int) -> tuple[native.Sampling, Tensor]:
    """How the native kernels draw without penalties, and the room that they need."""
    natively = SamplerState.create(params, [], vocab, torch.device("cpu")).natively
    assert natively is not None
    return natively


@given(
    vocab=st.sampled_from((1, 7, 500, 512, 513, 1031, 4096)),
    spread=st.sampled_from((0.0, 0.3, 3.0, 30.0)),
    seed=st.integers(0, 2**31),
    chance=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from((0.01, 0.6, 1.0, 3.0, 1e6)),
    top_k=st.sampled_from((0, 1, 2, 20, 600)),
    top_p=st.sampled_from((1.0, 0.999, 0.9, 0.3, 1e-6)),
    min_p=st.sampled_from((0.0, 0.0, 0.05, 0.9)),
    hidden=st.booleans(),
)
def test_a_chance_falls_on_the_token_that_it_falls_on_in_the_plain_sampler(
    vocab: int,
    spread: float,
    seed: int,
    chance: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    hidden: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator) * spread
    if hidden:
        logits[torch.rand(vocab, generator=generator) < 0.5] = -torch.inf
        logits[vocab // 2] = 1.0
    if not spread:  # of tokens alike the first ones are taken, and the plain sampler takes any
        logits -= torch.arange(vocab) * 1e-3
    params = SamplingParams(temperature, top_k, top_p, min_p)
    exact, ids = choices(logits.double(), params)
    # What is left may differ by tokens at the very bound, which rounding decides.
    wider = SamplingParams(temperature, top_k, min(top_p + 1e-5, 1.0), min_p * (1 - 1e-5))
    narrower = SamplingParams(temperature, top_k, top_p * (1 - 1e-5), min(min_p * (1 + 1e-5), 1.0))
    most, of_most = choices(logits.double(), wider)
    allowed = torch.arange(vocab)[most > 0] if of_most is None else of_most[most > 0]
    is_clear = int((most > 0).sum()) == int((choices(logits.double(), narrower)[0] > 0).sum())
    ends = (exact / exact.sum()).cumsum(0)
    for variant in native.library().variants.values():
        found = token(variant, logits, params, chance)
        assert found in allowed
        if not is_clear:
            continue
        place = found if ids is None else int((ids == found).nonzero()[0])
        assert (float(ends[place - 1]) if place else 0.0) - 1e-4 <= chance <= float(ends[place]) + 1e-4


@given(
    vocab=st.sampled_from((1, 7, 64, 65, 513, 1031)),
    seed=st.integers(0, 2**31),
    repetition=st.sampled_from((1.0, 1.1, 3.0, 0.7)),
    presence=st.sampled_from((0.0, 0.3, -0.9)),
    frequency=st.sampled_from((0.0, 0.1, -0.7)),
    alike=st.booleans(),
)
def test_penalties_and_the_likeliest_token_are_those_of_the_plain_sampler(
    vocab: int, seed: int, repetition: float, presence: float, frequency: float, alike: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator)
    if alike:
        logits = logits.round()
    text = torch.randint(vocab, (40,), generator=generator).tolist()
    params = SamplingParams(
        0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    state = SamplerState.create(params, text, vocab, torch.device("cpu"), text[20:])
    state.note(text[0])
    assert state.natively is not None
    expected = penalise(logits, state)
    for variant in native.library().variants.values():
        how, room = state.natively
        assert native.library().functions.ct_sample(variant, logits.data_ptr(), how) == likeliest(expected)
        if state.seen is not None or state.generated is not None:
            assert torch.equal(room[vocab:], expected)


@given(
    vocab=st.sampled_from((1, 31, 32, 33, 1031)),
    seed=st.integers(0, 2**31),
    share=st.sampled_from((0.0, 0.05, 0.9)),
)
def test_a_mask_hides_what_it_does_not_allow(vocab: int, seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator)
    bits = torch.rand(-(-vocab // 32), 32, generator=generator) < share
    words = (bits.long() << torch.arange(32)).sum(1)
    mask = torch.where(words >= 2**31, words - 2**32, words).int()
    hidden = ~bits.flatten()[:vocab]
    assert torch.equal(allowed(mask, vocab), ~hidden)
    expected = logits.masked_fill(hidden, -torch.inf)
    assert torch.equal(masked(logits, mask), expected)
    for text in ([], [0]):  # with penalties, too
        params = SamplingParams(0.0, repetition_penalty=1.5 if text else 1.0)
        state = SamplerState.create(params, text, vocab, torch.device("cpu"))
        assert state.natively is not None
        how, room = state.natively
        how.mask = mask.data_ptr()
        for variant in native.library().variants.values():
            found = native.library().functions.ct_sample(variant, logits.data_ptr(), how)
            assert found == likeliest(penalise(expected, state))
            assert torch.equal(room[vocab:], penalise(expected, state))


def test_a_mask_is_that_of_one_token_only() -> None:
    logits, mask = torch.arange(40.0), torch.tensor([1, 0], dtype=torch.int32)
    state = SamplerState.create(SamplingParams(0.0), [], 40, torch.device("cpu"))
    assert [sample(logits, state, mask), sample(logits, state), sample(logits, state, mask)] == [0, 39, 0]
    with pytest.raises(ValueError, match="words"):
        sample(logits, state, mask[:1])


def test_of_tokens_alike_the_first_ones_are_taken() -> None:
    logits = torch.zeros(3000)
    logits[1000:] = 1.0
    for variant in native.library().variants.values():
        params = SamplingParams(top_k=700)
        found = {token(variant, logits, params, i / 700 + 1e-6) for i in range(700)}
        assert found == set(range(1000, 1700))


def test_two_that_are_alike_but_for_rounding_may_change_places() -> None:
    """The bits of logits depend on how a prompt was cut where torch computes it."""
    one = torch.tensor([3.0, 1.0, 2.0, 0.0, 2.0])
    other = one.clone()
    other[2] += 1e-6
    one[4] += 1e-6
    for params in (SamplingParams(top_k=4), SamplingParams(top_k=4, top_p=0.95), SamplingParams(top_p=0.95)):
        for chance in (i / 100 + 1e-3 for i in range(100)):
            for variant in native.library().variants.values():
                assert token(variant, one, params, chance) == token(variant, other, params, chance)
        for seed in range(100):
            found = {
                sample(logits, replace(state, natively=None))
                for logits in (one, other)
                for state in (SamplerState.create(replace(params, seed=seed), [], 5, torch.device("cpu")),)
            }
            assert len(found) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_gives_no_token(value: float) -> None:
    for at in (0, 5, 514, 1029):
        logits = torch.zeros(1030)
        logits[at] = value
        for variant in native.library().variants.values():
            assert token(variant, logits, SamplingParams(), 0.5) == -1
        for temperature in (0.0, 0.7):
            state = SamplerState.create(SamplingParams(temperature), [], 1030, torch.device("cpu"))
            assert sample(logits, state) == -1


def test_nothing_but_minus_infinity_gives_no_token() -> None:
    for variant in native.library().variants.values():
        assert token(variant, torch.full((9,), -torch.inf), SamplingParams(), 0.5) == -1
