"""Sampling on the device against the plain sampler: the same tokens kept, and the draw that its noise decides."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.params import SamplingParams
from engine.sampling import sampler as plain_sampler
from engine.sampling.device_sampler import HISTORY, MANY_RACE_BLOCK, DeviceSampler, DrawFeatures
from engine.sampling.sampler import SamplerState

triton = pytest.importorskip("triton")
tl = triton.language
scores = pytest.importorskip("engine.kernels.triton.scores")
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the interpreter computes inf - inf in numpy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = DEVICE.type == "cuda"
DRAWS = 3000 if IS_GPU else 24
FEW = 12 if IS_GPU else 4
"""Draws, where one wrong token would be a failure: Triton's interpreter takes 0.1 s for each."""

BIAS = {id: float((id * 7919) % 13 - 6) for id in (0, 1, 3, 31, 32, 33, 500, 700, 998, 999)}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.7),
    "temperature": SamplingParams(temperature=1.5),
    "min_p": SamplingParams(temperature=1.3, min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=-0.5),
    "top_k": SamplingParams(temperature=1.5, top_k=20),
    "top_k 128": SamplingParams(temperature=3.0, top_k=128, repetition_penalty=1.3),
    "top_k, top_p": SamplingParams(temperature=1.2, top_k=64, top_p=0.8),
    "all narrow": SamplingParams(1.1, 50, 0.95, 0.03, repetition_penalty=1.3, presence_penalty=1.0),
    "top_p": SamplingParams(temperature=1.2, top_p=0.9),
    "all wide": SamplingParams(1.4, 300, 0.9, 0.02, repetition_penalty=1.3, presence_penalty=1.0),
    "frequency": SamplingParams(1.2, 40, presence_penalty=0.3, frequency_penalty=0.8),
    "bias": SamplingParams(1.2, 60, 0.95, logit_bias=BIAS),
    "bias, penalties": SamplingParams(
        1.5, repetition_penalty=1.3, presence_penalty=-0.4, frequency_penalty=-0.6, logit_bias=BIAS
    ),
}
PROMPT, GENERATED = list(range(0, 900, 3)), [*range(1, 900, 5), *range(1, 900, 15)]


@triton.jit
def noise_kernel(numbers, out, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + ids, scores.gumbel(ids, numbers))


def noise(seed: int, step: int, vocab: int) -> Tensor:
    blocks = triton.cdiv(vocab, 1024)
    out = torch.empty(blocks * 1024, device=DEVICE)
    noise_kernel[(blocks,)](torch.tensor([seed, step, 0], device=DEVICE), out, BLOCK=1024)
    return out[:vocab].cpu()


def logits_of(vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def loaded(
    params: SamplingParams, vocab: int, seed: int = 1, prompt: list[int] | None = None
) -> DeviceSampler:
    sampler = DeviceSampler(vocab, 1, DEVICE)
    sampler.load(0, params, prompt or [], [], seed)
    return sampler


def draw(sampler: DeviceSampler, logits: Tensor, counters: Tensor | None = None) -> int:
    active = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sampler.sample(logits[None].to(DEVICE), active, counters, sampler.draw([0]))
    return int(sampler.token)


def draws(params: SamplingParams, logits: Tensor, count: int, seed: int = 1) -> list[int]:
    sampler = loaded(params, len(logits), seed)
    return [draw(sampler, logits) for _ in range(count)]


def expected(logits: Tensor, params: SamplingParams, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The token ids that the plain sampler keeps after PROMPT and GENERATED, and their probabilities."""
    state = SamplerState.create(params, PROMPT, len(logits), torch.device("cpu"))
    for token in GENERATED:
        state.note(token)
    penalised = plain_sampler.penalise(
        plain_sampler.masked(plain_sampler.biased(logits.float(), state), mask), state
    )
    if params.temperature == 0.0:
        return torch.tensor([plain_sampler.likeliest(penalised)]), torch.ones(1)
    chances, ids = plain_sampler.choices(penalised, params)
    ids = torch.arange(len(chances)) if ids is None else ids
    return ids[chances > 0], chances[chances > 0]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab", [1000, 3079])
def test_takes_the_token_of_the_plain_filters_and_the_noise(name: str, vocab: int) -> None:
    params, sampler, found = SETTINGS[name], DeviceSampler(vocab, 1, DEVICE), set()
    for seed in range(6 if IS_GPU else 3):
        logits = logits_of(vocab, seed)
        ids, chances = expected(logits, params)
        sampler.load(0, params, PROMPT, GENERATED, seed)
        found.add(draw(sampler, logits))
        score = chances.log() + noise(seed, len(GENERATED), vocab)[ids]
        assert int(sampler.token) == int(ids[score.argmax()])
    assert len(found) > (3 if IS_GPU else 1)


@pytest.mark.parametrize("name", ["greedy, penalties", "min_p", "all narrow", "all wide"])
def test_a_vocabulary_of_many_blocks(name: str) -> None:
    vocab, params = 151_936 if IS_GPU else 20_003, SETTINGS[name]
    logits, sampler = logits_of(vocab), DeviceSampler(vocab, 1, DEVICE)
    ids, chances = expected(logits, params)
    sampler.load(0, params, PROMPT, GENERATED, seed=3)
    score = chances.log() + noise(3, len(GENERATED), vocab)[ids]
    assert draw(sampler, logits) == int(ids[score.argmax()])


def test_the_noise_is_gumbel_noise() -> None:
    sample = torch.cat([noise(5, step, 4096) for step in range(5)]).double().sort().values
    found = (torch.arange(len(sample)) + 0.5) / len(sample)
    distance = (found - torch.exp(-torch.exp(-sample))).abs().max()
    assert distance < 1.95 / len(sample) ** 0.5  # Kolmogorov-Smirnov, one in a thousand


def test_the_noise_depends_on_every_bit_of_the_seed_and_on_the_step() -> None:
    streams = [noise(0, 0, 64), noise(0, 1, 64)] + [noise(1 << bit, 0, 64) for bit in (0, 31, 32, 62)]
    for i, a in enumerate(streams):
        assert all(not torch.isin(a, b).any() for b in streams[:i])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.999)])
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    logits = torch.linspace(-60, -50, 1000)  # as good as impossible
    ids = torch.tensor([3, 31, 32, 500, 999])
    logits[ids] = torch.tensor([1.0, 0.5, 0.0, 1.5, -0.5])
    counts = torch.bincount(torch.tensor(draws(params, logits, DRAWS)), minlength=1000)[ids]
    assert counts.sum() == DRAWS
    wanted = logits[ids].softmax(-1) * DRAWS
    assert ((counts - wanted) ** 2 / wanted).sum() < 23.5  # chi-square, 4 degrees of freedom, p = 1e-4


def test_a_seed_fixes_the_tokens_whichever_kernel_draws_them() -> None:
    logits = torch.linspace(-60, -50, 2000)
    logits[torch.arange(0, 2000, 71)] = 1.0
    race = draws(SamplingParams(), logits, 5)
    assert race == draws(SamplingParams(), logits, 5)
    assert race == draws(SamplingParams(top_k=40), logits, 5)
    assert race == draws(SamplingParams(top_k=400), logits, 5)
    assert race != draws(SamplingParams(), logits, 5, seed=2)


def test_going_on_with_an_answer_goes_on_with_its_noise() -> None:
    logits = logits_of(1000)
    whole = draws(SamplingParams(temperature=2.0), logits, 6)
    sampler = DeviceSampler(1000, 1, DEVICE)
    sampler.load(0, SamplingParams(temperature=2.0), [1], whole[:3], seed=1)
    assert [draw(sampler, logits) for _ in range(3)] == whole[3:]


def test_min_p_searches_a_block_again_where_its_winner_fails() -> None:
    """Blocks whose own likeliest lets much pass that the likeliest of all does not."""
    logits = torch.full((5003,), -3.0)
    logits[::9] = 2.0
    logits[[77, 1500, 2500, 3500]] = 2.5
    logits[4500] = 3.0
    params, sampler, found = SamplingParams(min_p=0.5), DeviceSampler(5003, 1, DEVICE), set()
    for seed in range(12 if IS_GPU else 5):
        ids, chances = expected(logits, params)
        sampler.load(0, params, [], [], seed)
        found.add(draw(sampler, logits))
        assert int(sampler.token) == int(ids[(chances.log() + noise(seed, 0, 5003)[ids]).argmax()])
    assert len(found) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_likeliest(dtype: torch.dtype) -> None:
    logits = logits_of(3079).clamp(-20, 5).to(dtype)  # many at 5
    assert draws(SamplingParams(temperature=0.0), logits, 1) == [int(logits.argmax())]
    assert draws(SamplingParams(temperature=0.0), torch.zeros(3079, dtype=dtype), 1) == [0]


@pytest.mark.parametrize("top_k", [1, 5, 128])
@pytest.mark.parametrize("value", [0.0, -7.5])
def test_the_first_of_equals_are_the_top_k(top_k: int, value: float) -> None:
    assert max(draws(SamplingParams(top_k=top_k), torch.full((3079,), value), FEW)) < top_k
    logits = torch.full((3079,), value)
    logits[[3000, 3001]] = value + 1.0
    found = set(draws(SamplingParams(top_k=top_k, temperature=50.0), logits, FEW))
    assert found <= {3000, 3001, *range(top_k - 2)} if top_k > 1 else found == {3000}


def test_many_equal_logits_inside_the_chosen_groups() -> None:
    logits = torch.full((5003,), -1.0)
    logits[2016:4000] = 4.0  # 62 groups of equals: more than are ranked
    logits[::500] = 5.0
    found = set(draws(SamplingParams(top_k=30, temperature=20.0), logits, 25 if IS_GPU else 12))
    assert found <= {*range(0, 5003, 500), *range(2016, 2036)}
    assert len(found) > (10 if IS_GPU else 6)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("top_k", [0, 50, 300])
def test_forbidden_tokens_are_never_drawn(lowest: float, top_k: int) -> None:
    logits = torch.full((3079,), lowest)
    logits[[2, 1024, 3078]] = torch.tensor([-1.0, 0.0, 1.0])
    found = set(draws(SamplingParams(top_k=top_k), logits, 15 if IS_GPU else 6))
    assert found == {2, 1024, 3078} if IS_GPU else {1024, 3078} <= found <= {2, 1024, 3078}


@pytest.mark.parametrize("params", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.2}])
def test_a_tiny_temperature_takes_the_likeliest(params: dict[str, float]) -> None:
    logits = logits_of(1500).bfloat16()
    for temperature in (1e-3, 1e-38, 1e-300):
        assert (
            draws(SamplingParams(temperature=temperature, **params), logits, 2) == [int(logits.argmax())] * 2
        )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params", [SETTINGS[name] for name in ("greedy", "temperature", "top_k", "top_p", "min_p")]
)
@pytest.mark.parametrize("damage", ["nan", "inf", "all -inf"])
def test_a_token_of_minus_one_says_that_the_logits_are_damaged(params: SamplingParams, damage: str) -> None:
    logits = logits_of(3079)
    if damage == "all -inf":
        logits.fill_(-torch.inf)
    else:
        logits[2100] = float(damage)
    sampler = loaded(params, 3079)
    assert draw(sampler, logits) == -1
    assert not sampler.marks.any()
    assert draw(sampler, logits_of(3079)) >= 0


@pytest.mark.parametrize("name", ["greedy", "top_k", "top_p"])
def test_everything_goes_one_further_with_a_token(name: str) -> None:
    params = replace(SETTINGS[name], presence_penalty=1e-6)
    sampler = loaded(params, 1000)
    counters = torch.tensor([[7, 70, 700]], device=DEVICE)
    logits, tokens = logits_of(1000), []
    for i in range(HISTORY + 2 if name == "greedy" else 4):
        tokens.append(draw(sampler, logits + 9 * (torch.arange(1000) % 67 == i), counters))
    steps = len(tokens)
    assert sampler.step.tolist() == [steps]
    assert counters.tolist() == [[7 + steps, 70 + steps, 700 + steps]]
    wanted = {i % HISTORY: token for i, token in enumerate(tokens)}
    assert all(int(sampler.history[0, i]) == token for i, token in wanted.items())
    assert sampler.marks[0].nonzero().flatten().tolist() == sorted(set(tokens))
    assert all(int(sampler.marks[0, token]) == 1 + 2 * tokens.count(token) for token in tokens)


def test_penalties_reach_the_next_token() -> None:
    logits = torch.tensor([2.0, 1.5, 1.2, 0.0, -1.0] + [-9.0] * 1000)
    sampler = loaded(SamplingParams(temperature=0.0, repetition_penalty=2.0), 1005, prompt=[1])
    assert [draw(sampler, logits) for _ in range(3)] == [0, 2, 0]
    sampler.load(0, SamplingParams(temperature=0.0, presence_penalty=0.6), [0, 1], [], seed=0)
    assert [draw(sampler, logits) for _ in range(4)] == [0, 1, 0, 0]


def test_the_fastest_draw_for_some_slots() -> None:
    sampler = DeviceSampler(1000, 2, DEVICE)
    races = [{}, {"temperature": 0.0, "top_k": 5, "top_p": 0.5}, {"min_p": 0.1}, {"top_k": 1000}]
    others = [{"top_k": 1}, {"top_k": 129}, {"top_p": 0.5}, {"top_k": 1000, "top_p": 0.5}]
    for settings in (*races, *others):
        sampler.load(1, SamplingParams(**settings), [], [], seed=0)  # type: ignore[arg-type]
        assert sampler.draw([1]) == sampler.draw([0, 1]) == DrawFeatures(settings in races, False, False)
        assert sampler.draw([0]) == DrawFeatures(True, False, False)


def test_a_row_is_drawn_alike_in_every_company() -> None:
    """Every kind at once, in slots and rows of any order, beside rows that are nobody's: the tokens it draws alone."""
    vocab, steps = 2500, 2
    names = ["greedy, penalties", "min_p", "penalties", "all narrow", "top_p", "all wide"]
    logits = torch.stack(
        [torch.stack([logits_of(vocab, 9 * s + i) for i in range(len(names))]) for s in range(steps)]
    )
    alone = []
    for i, name in enumerate(names):
        sampler = DeviceSampler(vocab, 1, DEVICE)
        sampler.load(0, SETTINGS[name], PROMPT, GENERATED, seed=i)
        alone.append([draw(sampler, logits[s, i]) for s in range(steps)])
    slots = 12
    sampler = DeviceSampler(vocab, slots, DEVICE)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(1)).tolist()
    slot_of = {i: order[i] for i in range(len(names))}
    for i, name in enumerate(names):
        sampler.load(slot_of[i], SETTINGS[name], PROMPT, GENERATED, seed=i)
    idle = order[-1]
    counters = torch.zeros(slots, 2, dtype=torch.int64, device=DEVICE)
    found: list[list[int]] = [[] for _ in names]
    for s in range(steps):
        nobody = [-1] * (1 + 4 * s)  # few rows take one launch, many two
        rows = [*range(s, len(names)), *nobody, *range(s)]
        active = torch.tensor([slot_of.get(i, -1) for i in rows], dtype=torch.int32, device=DEVICE)
        batch = torch.stack([logits[s, i] if i >= 0 else torch.full((vocab,), torch.nan) for i in rows])
        sampler.sample(batch.to(DEVICE), active, counters)
        for i in range(len(names)):
            found[i].append(int(sampler.token[slot_of[i]]))
            assert int(sampler.history[slot_of[i], (len(GENERATED) + s) % HISTORY]) == found[i][-1]
    assert found == alone
    assert counters.tolist() == [
        [0, 0] if slot not in slot_of.values() else [steps, steps] for slot in range(slots)
    ]
    assert int(sampler.token[idle]) == -1


def test_loading_a_slot_leaves_the_others_as_they_are() -> None:
    params = SamplingParams(1.3, repetition_penalty=1.4)
    logits = logits_of(1000)
    alone = loaded(params, 1000, seed=5, prompt=PROMPT)
    sampler = DeviceSampler(1000, 3, DEVICE)
    sampler.load(1, params, PROMPT, [], seed=5)
    active = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    for i in range(6):
        sampler.load(i % 2 * 2, SETTINGS["all narrow"], PROMPT, GENERATED, seed=i)
        sampler.sample(logits[None].to(DEVICE), active)
        assert int(sampler.token[1]) == draw(alone, logits)


@pytest.mark.parametrize(
    "params", [SETTINGS["temperature"], SETTINGS["min_p"], SETTINGS["greedy, penalties"]]
)
def test_both_kernels_draw_the_same_from_all_tokens(params: SamplingParams) -> None:
    vocab = MANY_RACE_BLOCK + 1100
    samplers = [loaded(params, vocab, prompt=PROMPT) for _ in range(2)]
    many = DeviceSampler(vocab, 4, DEVICE)
    many.load(3, params, PROMPT, [], seed=1)
    active = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    beside = torch.tensor([3, -1], dtype=torch.int32, device=DEVICE)
    for i in range(FEW):
        logits = logits_of(vocab, i)[None].to(DEVICE)
        samplers[0].sample(logits, active, draw=DrawFeatures(race=True))
        samplers[1].sample(logits, active, draw=DrawFeatures())
        many.sample(logits.repeat(len(beside), 1), beside, draw=DrawFeatures(race=True))
        assert samplers[0].token[0] == samplers[1].token[0] == many.token[3]


def kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """The ids that stay, the lower ones first among equals, in float64 and without penalties."""
    values, order = logits.double().sort(descending=True, stable=True)
    chances = ((values - values[0]) / params.temperature).exp()
    chances[params.top_k or len(chances) :] = 0.0
    stay = chances.cumsum(0) - chances < params.top_p * chances.sum()
    return order[stay & (chances > 0.0) & (chances >= params.min_p)]


@pytest.mark.parametrize("flat", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=200),
        SamplingParams(top_k=700, top_p=0.6),
        SamplingParams(top_k=700, top_p=0.9, min_p=0.5),
    ],
)
def test_an_edge_that_lies_behind_the_ranked_tokens(params: SamplingParams, flat: float) -> None:
    """Hundreds of tokens stay, many of them equal to the last."""
    logits = (logits_of(2500, 3) * flat).bfloat16().float()
    sampler = DeviceSampler(len(logits), 1, DEVICE)
    ids = kept(logits, params)
    assert len(ids) > (128 if params.min_p == 0.0 else 1)
    for seed in range(FEW // 2):
        sampler.load(0, params, [], [], seed)
        assert draw(sampler, logits) == int(ids[(logits[ids] + noise(seed, 0, len(logits))[ids]).argmax()])


def test_the_edge_is_exact_to_the_token() -> None:
    """The likeliest and the first two of four equals stay; that top_k is large makes the whole vocabulary matter."""
    logits = torch.linspace(-9.0, -8.0, 2500)
    logits[[7, 900, 1800, 2400]] = 1.0
    logits[2100] = 1.2
    params = SamplingParams(top_k=2000, top_p=0.5)
    assert kept(logits, params).tolist() == [2100, 7, 900]
    assert set(draws(params, logits, 10)) == {2100, 7, 900}
