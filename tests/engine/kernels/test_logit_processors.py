"""Biases, masks and log-probabilities on the device, against the plain sampler."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.params import Constraint, SamplingParams
from engine.sampling import sampler as plain
from engine.sampling.device_sampler import HISTORY, DeviceSampler, DrawFeatures
from engine.sampling.sampler import SamplerState
from tests.fresh import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 200 if DEVICE.type == "cuda" else 6
"""The interpreter takes half a second for each."""
CONSTRAINED = Constraint("json_object")
PLAIN = SamplingParams(temperature=0.0)


def mask_of(vocab: int, share: float, generator: torch.Generator) -> Tensor:
    """int32 words: each token is allowed with this chance, token 1 always."""
    bits = torch.rand(-(-vocab // 32), 32, generator=generator) < share
    bits[0, 1] = True
    words = (bits.long() << torch.arange(32)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@examples(EXAMPLES)
@given(
    vocab=st.sampled_from((33, 1000, 2048, 5003)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 2**31),
    share=st.sampled_from((0.0, 0.01, 0.5, 1.0)),
    of_slot=st.lists(
        st.sampled_from(("nothing", "bias", "mask", "bias, mask", "all")), min_size=3, max_size=3
    ),
    counts=st.lists(st.sampled_from((None, 0, 1, 5, 20)), min_size=3, max_size=3),
)
def test_slots_of_every_kind_in_one_launch(
    vocab: int, dtype: torch.dtype, seed: int, share: float, of_slot: list[str], counts: list[int | None]
) -> None:
    """Greedy tokens and log-probabilities are those of the plain sampler, whoever is beside them."""
    generator = torch.Generator().manual_seed(seed)
    sampler = DeviceSampler(vocab, 3, DEVICE)
    logits = (torch.randn(4, vocab, generator=generator) * 4).to(dtype)
    logits[:, torch.rand(vocab, generator=generator) < 0.1] = -torch.inf
    logits[:, 1] = -3.0
    history = torch.randint(vocab, (40,), generator=generator).tolist()
    ids = torch.randperm(vocab, generator=generator)[: min(vocab, 1024)].tolist()
    states, masks = [], []
    for slot, (kind, count) in enumerate(zip(of_slot, counts, strict=True)):
        params = replace(PLAIN, logprobs=count)
        if "bias" in kind or kind == "all":
            params = replace(params, logit_bias={id: (id % 9) - 4.5 for id in ids[: 10 if slot else 1024]})
        if kind == "all":
            params = replace(params, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.7)
        has_mask = "mask" in kind or kind == "all"
        params = replace(params, constraint=CONSTRAINED if has_mask else None)
        masks.append(mask_of(vocab, share, generator) if has_mask else None)
        if has_mask:
            sampler.words(slot)[:] = masks[-1].numpy()  # type: ignore[union-attr]
        sampler.load(slot, params, history[:20], history[20:], seed=slot)
        states.append(SamplerState.create(params, history, vocab, torch.device("cpu"), history[20:]))
    order = torch.randperm(3, generator=generator).tolist()
    active = torch.tensor([order[0], -1, *order[1:]], dtype=torch.int32, device=DEVICE)
    draw = sampler.draw(range(3))
    assert draw == DrawFeatures(
        True, any(kind != "nothing" for kind in of_slot), any(c is not None for c in counts)
    )
    sampler.sample(logits.to(DEVICE), active, draw=draw)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for row, slot in ((0, order[0]), (2, order[1]), (3, order[2])):
        state = states[slot]
        wanted = plain.sample(logits[row], state, masks[slot])
        (found,) = sampler.drawn([(slot, 20, counts[slot])])
        assert found.token_id == wanted
        if counts[slot] is None:
            assert (found.logprob, found.top) == (None, ())
            continue
        told = plain.log_chances(logits[row], wanted, counts[slot])  # type: ignore[arg-type]
        assert found.logprob == pytest.approx(told.logprob, abs=1e-4)
        assert [id for id, _ in found.top] == [id for id, _ in told.top]
        assert [chance for _, chance in found.top] == pytest.approx([c for _, c in told.top], abs=1e-4)


def test_draws_with_a_mask_are_those_of_logits_that_have_nothing_else() -> None:
    """The mask changes which tokens there are, and no random number."""
    vocab, generator = 3000, torch.Generator().manual_seed(3)
    mask = mask_of(vocab, 0.2, generator)
    allowed = plain.allowed(mask, vocab)
    for params in (SamplingParams(), SamplingParams(top_k=20), SamplingParams(top_p=0.8)):
        masked, given_less = DeviceSampler(vocab, 1, DEVICE), DeviceSampler(vocab, 1, DEVICE)
        masked.words(0)[:] = mask.numpy()
        masked.load(0, replace(params, constraint=CONSTRAINED), [], [], seed=5)
        given_less.load(0, params, [], [], seed=5)
        for step in range(2):
            logits = torch.randn(1, vocab, generator=generator) * 3
            for sampler, row in ((masked, logits), (given_less, logits.masked_fill(~allowed, -torch.inf))):
                active = torch.zeros(1, dtype=torch.int32, device=DEVICE)
                sampler.sample(row.to(DEVICE), active, draw=sampler.draw([0]))
            assert int(masked.token) == int(given_less.token)
            assert allowed[int(masked.token)]
            assert int(masked.history[0, step % HISTORY]) == int(masked.token)


def test_damaged_logits_tell_nothing() -> None:
    sampler = DeviceSampler(500, 1, DEVICE)
    sampler.load(0, SamplingParams(logprobs=3), [], [], seed=5)
    active = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sampler.sample(torch.full((1, 500), torch.nan, device=DEVICE), active, draw=sampler.draw([0]))
    assert sampler.drawn([(0, 0, 3)]) == [plain.SampledToken(-1)]
