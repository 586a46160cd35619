"""The sampler inside CUDA graphs and at a real vocabulary; tests/engine/kernels/test_sampling.py has the rules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.params import SamplingParams
from engine.sampling.device_sampler import HISTORY, DeviceSampler
from engine.sampling.sampler import SamplerState, sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
VOCAB = 151_936
PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5),
    "race": SamplingParams(temperature=0.9, min_p=0.02, presence_penalty=0.5),
    "narrow": SamplingParams(0.6, 20, 0.95, 0.01, repetition_penalty=1.2, presence_penalty=0.5),
    "wide": SamplingParams(0.8, 0, 0.9, 0.01, repetition_penalty=1.2),
}


def logits_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return (torch.randn(VOCAB, device=GPU, generator=generator) * 3).to(dtype)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which has run once before."""
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
    eager, replayed = DeviceSampler(VOCAB, GPU), DeviceSampler(VOCAB, GPU, pdl=pdl)
    logits = torch.empty_like(rows[0])
    counters = torch.zeros(2, dtype=torch.int64, device=GPU)
    replayed.load(SETTINGS[name], [], [], seed=0)
    graph = captured(lambda: replayed.sample(logits, counters))
    tokens: list[list[int]] = [[], []]
    for seed in (3, 2**62 + 3):  # one graph serves every sequence of its kind
        counters.zero_()
        for sampler in (eager, replayed):
            sampler.load(SETTINGS[name], [5, 6, 7], [8, 9], seed)
        for i in range(steps):
            logits.copy_(rows[i % len(rows)])
            eager.sample(logits)
            graph.replay()
            tokens[0].append(int(eager.token))
            tokens[1].append(int(replayed.token))
            assert int(replayed.history[(2 + i) % HISTORY]) == tokens[1][-1]
        assert counters.tolist() == [steps, steps]
        assert torch.equal(eager.seen, replayed.seen)
    assert tokens[0] == tokens[1]
    assert tokens[0][:steps] != tokens[0][steps:] or name == "greedy"
    assert min(tokens[0]) >= 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_takes_the_tokens_of_the_plain_sampler(dtype: torch.dtype) -> None:
    params, sampler = SETTINGS["greedy"], DeviceSampler(VOCAB, GPU)
    prompt = list(range(0, VOCAB, 7))
    state = SamplerState.create(params, prompt, VOCAB, torch.device("cpu"))
    sampler.load(params, prompt, [], seed=0)
    logits = logits_of(1, dtype)
    for _ in range(30):
        sampler.sample(logits)
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
    sampler = DeviceSampler(VOCAB, GPU)
    sampler.load(params, [], [], seed=11)
    graph = captured(lambda: sampler.sample(logits))
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
    sampler = DeviceSampler(VOCAB, GPU)
    for params in SETTINGS.values():
        for at in (0, 75_000, VOCAB - 1):
            logits = logits_of(3)
            logits[at] = torch.nan
            sampler.load(params, [], [], seed=0)
            sampler.sample(logits)
            assert int(sampler.token) == -1
