"""The sampler inside CUDA graphs and with a real vocabulary; tests/engine/kernels/test_sampling.py tests the rules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.params import Constraint, SamplingParams
from engine.sampling.device_sampler import HISTORY, DeviceSampler
from engine.sampling.sampler import SampledToken, SamplerState, log_chances, sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
VOCAB = 151_936
PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5),
    "race": SamplingParams(temperature=0.9, min_p=0.02, presence_penalty=0.5),
    "narrow": SamplingParams(0.6, 20, 0.95, 0.01, repetition_penalty=1.2, presence_penalty=0.5),
    "wide": SamplingParams(0.8, 0, 0.9, 0.01, repetition_penalty=1.2),
    "biased": SamplingParams(
        0.8, 30, 0.9, frequency_penalty=0.4, logit_bias={5: 3.0, 150_000: 4.0}, logprobs=3
    ),
}


def logits_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return (torch.randn(VOCAB, device=GPU, generator=generator) * 3).to(dtype)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a graph of `work`, which has run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.parametrize(
    "pdl", [False, pytest.param(True, marks=pytest.mark.skipif(not PDL, reason="needs sm_90"))]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_graph_draws_the_tokens_of_eager_sampling(name: str, pdl: bool) -> None:
    rows, steps = torch.stack([logits_of(seed) for seed in range(4)]), 100
    eager, replayed = DeviceSampler(VOCAB, 1, GPU), DeviceSampler(VOCAB, 1, GPU, pdl=pdl)
    logits = torch.empty_like(rows[:1])
    active = torch.zeros(1, dtype=torch.int32, device=GPU)
    counters = torch.zeros(1, 2, dtype=torch.int64, device=GPU)
    replayed.load(0, SETTINGS[name], [], [], seed=0)
    graph = captured(lambda: replayed.sample(logits, active, counters, replayed.draw([0])))
    tokens: list[list[int]] = [[], []]
    for seed in (3, 2**62 + 3):  # one graph serves every sequence of its kind
        counters.zero_()
        for sampler in (eager, replayed):
            sampler.load(0, SETTINGS[name], [5, 6, 7], [8, 9], seed)
        for i in range(steps):
            logits[0] = rows[i % len(rows)]
            eager.sample(logits, active)
            graph.replay()
            tokens[0].append(int(eager.token))
            tokens[1].append(int(replayed.token))
            assert int(replayed.history[0, (2 + i) % HISTORY]) == tokens[1][-1]
        assert counters.tolist() == [[steps, steps]]
        assert torch.equal(eager.marks, replayed.marks)
    assert tokens[0] == tokens[1]
    assert tokens[0][:steps] != tokens[0][steps:] or name == "greedy"
    assert min(tokens[0]) >= 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_takes_the_tokens_of_the_plain_sampler(dtype: torch.dtype) -> None:
    params, sampler = SETTINGS["greedy"], DeviceSampler(VOCAB, 1, GPU)
    prompt = list(range(0, VOCAB, 7))
    state = SamplerState.create(params, prompt, VOCAB, torch.device("cpu"))
    sampler.load(0, params, prompt, [], seed=0)
    logits = logits_of(1, dtype)
    active = torch.zeros(1, dtype=torch.int32, device=GPU)
    for _ in range(30):
        sampler.sample(logits[None], active, draw=sampler.draw([0]))
        plain = int(sample(logits.cpu(), state))
        state.note(plain)
        assert int(sampler.token) == plain


@pytest.mark.parametrize("name", ["race", "narrow", "wide"])
def test_draws_follow_the_probabilities_of_the_plain_sampler(name: str) -> None:
    """Chi-square over the likeliest tokens; the rest of the vocabulary counts as one."""
    params = {
        "race": SamplingParams(temperature=0.6),
        "narrow": SamplingParams(temperature=2.0, top_k=40, top_p=0.9),
        "wide": SamplingParams(temperature=1.5, top_p=0.8),
    }[name]
    logits, draws, bins = logits_of(2, torch.float32), 20_000, 12
    sampler = DeviceSampler(VOCAB, 1, GPU)
    sampler.load(0, params, [], [], seed=11)
    active = torch.zeros(1, dtype=torch.int32, device=GPU)
    graph = captured(lambda: sampler.sample(logits[None], active, draw=sampler.draw([0])))
    tokens = torch.empty(draws, dtype=torch.int64, device=GPU)
    for i in range(draws):
        graph.replay()
        tokens[i : i + 1] = sampler.token
    chances = (logits / params.temperature).double().softmax(-1)
    chances, order = chances.sort(descending=True)
    chances = chances[: params.top_k or VOCAB]
    chances = chances / chances.sum()
    chances = chances[chances.cumsum(0) - chances < params.top_p]
    chances = chances / chances.sum()
    assert bool(torch.isin(tokens, order[: len(chances)]).all())
    counts = torch.bincount(tokens, minlength=VOCAB)[order]
    wanted = torch.cat([chances[:bins], 1 - chances[:bins].sum(0, keepdim=True)]).float() * draws
    found = torch.cat([counts[:bins], counts[bins:].sum(0, keepdim=True)])
    assert ((found - wanted) ** 2 / wanted).sum() < 39.2  # 12 degrees of freedom, p = 1e-4


def test_damaged_logits_are_noticed_in_every_block() -> None:
    sampler = DeviceSampler(VOCAB, 1, GPU)
    active = torch.zeros(1, dtype=torch.int32, device=GPU)
    for params in SETTINGS.values():
        for at in (0, 75_000, VOCAB - 1):
            logits = logits_of(3)
            logits[at] = torch.nan
            sampler.load(0, params, [], [], seed=0)
            sampler.sample(logits[None], active, draw=sampler.draw([0]))
            assert int(sampler.token) == -1


def test_a_row_is_drawn_alike_in_every_company() -> None:
    """256 rows of every kind, at other places beside other rows in every step, with graphs: each draws as alone."""
    slots, steps, names = 256, 5, list(SETTINGS)
    logits = torch.stack([logits_of(100 + i) * (0.3 if i % 3 else 1.0) for i in range(slots)])
    params = [SETTINGS[names[i % len(names)]] for i in range(slots)]
    alone, together = DeviceSampler(VOCAB, 1, GPU), DeviceSampler(VOCAB, slots, GPU, pdl=PDL)
    one = torch.zeros(1, dtype=torch.int32, device=GPU)
    wanted = []
    for i in range(slots):
        alone.load(0, params[i], [i, i + 1], [7], seed=i)
        for s in range(steps):
            alone.sample(logits[(i + s) % slots][None], one, draw=alone.draw([0]))
        torch.cuda.synchronize()
        wanted.append(alone.history[0, 1 : 1 + steps].clone())
    for i in range(slots):
        together.load(i, params[i], [i, i + 1], [7], seed=i)
    active = torch.full((slots,), -1, dtype=torch.int32, device=GPU)
    batch = torch.zeros_like(logits)
    graph = captured(lambda: together.sample(batch, active))
    for s in range(steps):
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(s))
        for half in (order[: slots // 2], order[slots // 2 :]):  # the other rows are unused
            active.copy_(torch.cat([half, torch.full((slots - len(half),), -1)]))
            batch[: len(half)] = logits[((half + s) % slots).to(GPU)]
            graph.replay()
    torch.cuda.synchronize()
    for i in range(slots):
        assert torch.equal(together.history[i, 1 : 1 + steps], wanted[i]), (i, params[i])


def test_slots_of_every_kind_with_masks_biases_and_log_probabilities_in_one_graph() -> None:
    """Greedy tokens and their log-probabilities are those of the plain sampler, whatever other rows are in the step."""
    slots, steps, cpu = 64, 4, torch.device("cpu")
    words = -(-VOCAB // 32)
    sampler = DeviceSampler(VOCAB, slots, GPU, pdl=PDL)
    batch = torch.zeros(slots, VOCAB, dtype=torch.bfloat16, device=GPU)
    active = torch.arange(slots, dtype=torch.int32, device=GPU)
    params, states = [], []
    for slot in range(slots):
        bias = {
            (slot * 977 + 31 * i) % VOCAB: float(i % 9 - 4) * 3 for i in range(1024 if slot % 4 == 1 else 0)
        }
        params.append(
            SamplingParams(
                temperature=0.0,
                frequency_penalty=0.5 if slot % 3 == 0 else 0.0,
                presence_penalty=0.2 if slot % 5 == 0 else 0.0,
                logit_bias=bias,
                logprobs=(None, 0, 5, 20)[slot % 4],
                constraint=Constraint("json_object") if slot % 2 else None,
            )
        )
        history = [slot, 7, 7, 8]
        sampler.load(slot, params[slot], history[:1], history[1:], seed=slot)
        states.append(SamplerState.create(params[slot], history, VOCAB, cpu, history[1:]))
    draw = sampler.draw(range(slots))
    assert draw == (True, True, True)
    graph = captured(lambda: sampler.sample(batch, active, None, draw))
    for slot in range(slots):  # the capture drew once
        sampler.load(slot, params[slot], [slot], [7, 7, 8], seed=slot)
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        logits = torch.stack([logits_of(1000 * step + slot) for slot in range(slots)])
        batch.copy_(logits)
        masks = torch.randint(-(2**31), 2**31, (slots, words), generator=generator).int()
        torch.cuda.synchronize()
        for slot in range(1, slots, 2):
            sampler.words(slot)[:] = masks[slot].numpy()
        graph.replay()
        torch.cuda.synchronize()
        found = sampler.drawn([(slot, 3 + step, params[slot].logprobs) for slot in range(slots)])
        for slot, (drawn, row) in enumerate(zip(found, logits.cpu(), strict=True)):
            wanted = sample(row, states[slot], masks[slot] if slot % 2 else None)
            states[slot].note(wanted)
            assert drawn.token_id == wanted, (slot, params[slot])
            count = params[slot].logprobs
            if count is None:
                assert drawn == SampledToken(wanted)
                continue
            told = log_chances(row, wanted, count)
            assert drawn.logprob == pytest.approx(told.logprob, abs=1e-3)
            assert [id for id, _ in drawn.top] == [id for id, _ in told.top]
            assert [c for _, c in drawn.top] == pytest.approx([c for _, c in told.top], abs=1e-3)


def test_loading_a_slot_neither_waits_nor_disturbs_what_is_enqueued() -> None:
    """A slot is loaded repeatedly behind steps that have not run yet; each step sees what was loaded before it."""
    sampler = DeviceSampler(VOCAB, 4, GPU)
    active = torch.zeros(1, dtype=torch.int32, device=GPU)
    logits = logits_of(5)[None]
    params = SamplingParams(1.0, repetition_penalty=1.1)
    tokens = torch.empty(20, dtype=torch.int64, device=GPU)
    seen = []
    for delay in (
        0,
        2_000_000_000,
    ):  # clock cycles: the second time, nothing runs before everything is enqueued
        sampler.load(0, params, list(range(1000)), [], 0)
        sampler.sample(logits, active)
        torch.cuda.synchronize()
        torch.cuda._sleep(delay)
        enqueued = torch.cuda.Event()  # type: ignore[no-untyped-call]
        enqueued.record()  # type: ignore[no-untyped-call]
        for i in range(20):
            sampler.load(0, params, list(range(i, 1000 + i)), [], seed=i)
            sampler.sample(logits, active)
            tokens[i] = sampler.token[0]
        assert delay == 0 or not enqueued.query()  # type: ignore[no-untyped-call]
        seen.append(tokens.tolist())
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 5
