"""Sampling: the distributions, not just that it runs."""

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.native import library as native
from engine.params import SamplingParams
from engine.sampling.sampler import SampledToken, SamplerState, allowed, biased, log_chances, penalise, sample

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -1.5, -2.0, -4.0])
DRAWS = 4000


def frequencies(params: SamplingParams, prompt: list[int] | None = None, logits: Tensor = LOGITS) -> Tensor:
    state = SamplerState.create(params, prompt or [], len(logits), torch.device("cpu"))
    drawn = torch.tensor([sample(logits, state) for _ in range(DRAWS)])
    return torch.bincount(drawn, minlength=len(logits)) / DRAWS


def matches(found: Tensor, expected: Tensor) -> bool:
    """Within five standard deviations of what `DRAWS` draws give, and never a token without a chance."""
    bound = 5 * (expected * (1 - expected) / DRAWS).sqrt()
    return bool(((found - expected).abs() <= bound + 1e-9).all())


def renormalised(probabilities: Tensor, kept: list[int]) -> Tensor:
    mask = torch.zeros_like(probabilities)
    mask[kept] = 1
    return probabilities * mask / (probabilities * mask).sum()


def test_temperature_scales_the_logits() -> None:
    for temperature in (0.5, 1.0, 2.0):
        params = SamplingParams(temperature=temperature, seed=1)
        assert matches(frequencies(params), (LOGITS / temperature).softmax(-1))


def test_top_k_keeps_the_likeliest() -> None:
    found = frequencies(SamplingParams(top_k=3, seed=2))
    assert matches(found, renormalised(LOGITS.softmax(-1), [0, 1, 2]))


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    shares = LOGITS.softmax(-1).cumsum(-1)
    found = frequencies(SamplingParams(top_p=float(shares[1]) + 0.01, seed=3))
    assert matches(found, renormalised(LOGITS.softmax(-1), [0, 1, 2]))
    assert frequencies(SamplingParams(top_p=1e-6, seed=3))[0] == 1.0


def test_min_p_is_relative_to_the_likeliest() -> None:
    probabilities = LOGITS.softmax(-1)
    kept = [i for i, p in enumerate(probabilities) if p >= 0.2 * probabilities[0]]
    assert 1 < len(kept) < len(LOGITS)
    assert matches(frequencies(SamplingParams(min_p=0.2, seed=4)), renormalised(probabilities, kept))


def test_all_filters_work_on_what_the_one_before_left() -> None:
    params = SamplingParams(temperature=0.8, top_k=4, top_p=0.9, min_p=0.05, seed=5)
    top = renormalised((LOGITS / 0.8).softmax(-1), [0, 1, 2, 3])
    kept = [0]
    while top[kept].sum() < 0.9:
        kept.append(len(kept))
    assert matches(frequencies(params), renormalised(top, [i for i in kept if top[i] >= 0.05 * top[0]]))


def test_repetition_penalty_is_for_prompt_and_answer_and_both_signs() -> None:
    logits = LOGITS.clone()
    logits[0] /= 1.3
    logits[5] *= 1.3
    params = SamplingParams(repetition_penalty=1.3, seed=6)
    assert matches(frequencies(params, prompt=[0, 5, 5]), logits.softmax(-1))
    state = SamplerState.create(
        SamplingParams(temperature=0.0, repetition_penalty=2.0), [], 8, torch.device("cpu")
    )
    chosen = []
    for _ in range(3):
        chosen.append(int(sample(LOGITS, state)))
        state.note(chosen[-1])
    assert chosen == [0, 1, 0]


def test_presence_penalty_is_for_the_answer_only() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=0.6)
    state = SamplerState.create(params, [0], 8, torch.device("cpu"))
    assert int(sample(LOGITS, state)) == 0
    state.note(0)
    assert int(sample(LOGITS, state)) == 1


def test_greedy_takes_the_maximum_and_needs_no_generator() -> None:
    state = SamplerState.create(SamplingParams(temperature=0.0), [], 8, torch.device("cpu"))
    assert state.generator is None
    assert int(sample(LOGITS.to(torch.bfloat16), state)) == 0


def test_a_seed_fixes_the_draws_and_no_seed_does_not() -> None:
    def draws(seed: int | None) -> list[int]:
        state = SamplerState.create(SamplingParams(seed=seed), [], 8, torch.device("cpu"))
        return [int(sample(LOGITS, state)) for _ in range(60)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=1e-300),
        SamplingParams(top_p=1e-50),
        SamplingParams(top_k=1, temperature=1e30),
        SamplingParams(min_p=1.0),
    ],
)
def test_settings_at_their_limit_still_take_the_likeliest(params: SamplingParams) -> None:
    logits = LOGITS.roll(3)  # the first token is not the likeliest: it is what a draw from nothing gives
    logits[5] = float("-inf")
    assert frequencies(params, logits=logits)[3] == 1.0


def test_a_huge_temperature_and_top_k_leave_every_token_its_chance() -> None:
    found = frequencies(SamplingParams(temperature=1e30, top_k=10**9, seed=8))
    assert matches(found, torch.full_like(LOGITS, 1 / len(LOGITS)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 3.0),
        ("max_tokens", 0),
        ("seed", -1),
        ("stop", ("",)),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(EngineError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_frequency_penalty_counts() -> None:
    logits = torch.tensor([2.0, 1.5, 0.9])
    params = SamplingParams(temperature=0.0, frequency_penalty=0.4, presence_penalty=0.05)
    state = SamplerState.create(params, [1, 0], 3, torch.device("cpu"), earlier=[0])
    drawn = []
    for _ in range(6):
        drawn.append(sample(logits, state))
        state.note(drawn[-1])
    # 2 - 0.45 once; then each token falls by 0.4 as often as it comes, and by 0.05 the first time
    assert drawn == [0, 1, 0, 1, 2, 0]


def test_a_bias_is_added_before_everything_else() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0])
    params = SamplingParams(temperature=0.0, logit_bias={3: 3.0, 0: -100.0}, repetition_penalty=2.0)
    assert sample(logits, SamplerState.create(params, [], 4, torch.device("cpu"))) == 3
    assert sample(logits, SamplerState.create(params, [3], 4, torch.device("cpu"))) == 3
    params = SamplingParams(temperature=0.0, logit_bias={3: 3})  # whole numbers, as people write them
    assert sample(logits, SamplerState.create(params, [], 4, torch.device("cpu"))) == 3
    params = SamplingParams(temperature=0.0, logit_bias={3: 1.4}, repetition_penalty=2.0)
    assert sample(logits, SamplerState.create(params, [3], 4, torch.device("cpu"))) == 0


def test_log_probabilities_are_those_of_the_logits_and_the_lower_of_equals_comes_first() -> None:
    logits = torch.tensor([0.0, 3.0, -torch.inf, 3.0, 1.0, 3.0]).bfloat16()
    wanted = logits.double().log_softmax(-1).tolist()
    for count in (0, 1, 2, 5, 6):
        told = log_chances(logits, 4, count)
        assert told.token_id == 4
        assert told.logprob == pytest.approx(wanted[4], abs=1e-5)
        assert [id for id, _ in told.top] == [1, 3, 5, 4, 0, 2][:count]
        assert [chance for _, chance in told.top] == pytest.approx(
            [wanted[id] for id, _ in told.top], abs=1e-5
        )
    assert log_chances(logits, -1, 3) == SampledToken(-1)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_mask_leaves_what_it_allows(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels:
        monkeypatch.setattr(native, "problem", lambda: "there are none")
    mask = torch.tensor([-(2**31), 1], dtype=torch.int32)  # tokens 31 and 32
    assert allowed(mask, 40).nonzero().flatten().tolist() == [31, 32]
    huge = SamplingParams(temperature=1e300), SamplingParams(temperature=1e300, top_k=5)
    cool = SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=5, top_p=0.9)
    for params in (*cool, *huge):
        state = SamplerState.create(params, [], 40, torch.device("cpu"))
        logits = torch.arange(40.0)
        logits[31] = 31.5
        before = logits.clone()
        assert {sample(logits, state, mask) for _ in range(30)} <= {31, 32}
        assert torch.equal(logits, before)


def test_a_request_that_asks_for_nothing_keeps_its_bits() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    state = SamplerState.create(SamplingParams(), [], 40, torch.device("cpu"))
    assert (state.seen, state.generated, state.biased) == (None, None, None)
    assert torch.equal(penalise(biased(logits, state), state), logits)
