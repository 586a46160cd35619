"""A draft model in slots, in Triton's interpreter: its chains are what the same model drafts token by token."""

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine import build
from engine.attention.choose import make_backend
from engine.attention.unusual import unusual_layers
from engine.cache.blocks import BlockManager
from engine.cache.kv_cache import KVCache
from engine.cache.kv_needs import kv_needs
from engine.cache.kv_rows import layer_rows
from engine.cache.sizing import KVPlan
from engine.errors import EngineError
from engine.execute.build_options import BuildOptions
from engine.execute.cuda.draft_runner import make_draft_runner
from engine.execute.runner import Runner
from engine.params import SamplingParams
from engine.sampling.sampler import SampledToken
from engine.schedule.drafting import Drafting
from engine.schedule.drafting_in_slots import SlotDrafting
from engine.speculation.sources import NOTHING, DraftRequest, Drawing, Guess
from models.loading.load import load_model
from models.network import Network
from tests.engine.hybrid import hybrid_network
from tests.engine.kernels.test_delta_steps import SPECS
from tests.engine.test_decode_runner import Event
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"),
    pytest.mark.usefixtures("few_programs"),
]
DEVICE, BLOCK, BLOCKS, ROWS, VOCAB = torch.device("cpu"), 16, 40, 120, 24
HOW = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=9, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2),
    SamplingParams(temperature=1.0, logit_bias={3: 2.0, 90: 1.0}),
]


@pytest.fixture(scope="module", params=["plain", "hybrid", "mamba"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Network:
    """The first layer of those that are not plain is recurrent."""
    if request.param != "plain":
        spec = SPECS["usual" if request.param == "hybrid" else "mamba"]
        return hybrid_network(replace(spec, vocab_size=VOCAB, layers=spec.layers[:2]))
    folder: Path = tmp_path_factory.mktemp("drafts")
    config = tiny_qwen3(
        num_hidden_layers=1, head_dim=64, num_attention_heads=2, num_key_value_heads=1,
        hidden_size=32, intermediate_size=32, vocab_size=VOCAB,
    )  # fmt: skip
    return load_model(files_of(write_checkpoint(folder, config)), dtype=torch.float32, device=DEVICE)


def parts(network: Network) -> tuple[KVCache, dict[str, Any]]:
    needs = kv_needs(network.spec, torch.float32, step=64, block_size=BLOCK)
    slots, states = tuple(BLOCKS for _ in needs.groups), 24 * bool(needs.state_bytes)
    plan = KVPlan(ROWS, BLOCKS, needs, slots=slots, states=states)
    cache = build._allocate(plan, layer_rows(network.spec, torch.float32, DEVICE), network, "auto")
    for states in cache.states.layers.values() if cache.states is not None else ():
        states.fill_(float("nan"))
    marks = build._marks(plan, cache, BuildOptions(drafts_for=VOCAB))
    runner = Runner(network, make_backend("sdpa", cache, unusual_layers(network)), DEVICE)
    blocks = BlockManager(BLOCKS, BLOCK, cache.carry_out, None, None, cache.pools, marks)
    return cache, {
        "name": "small", "runner": runner, "blocks": blocks, "vocab_size": VOCAB, "most_rows": ROWS, "max_chunk": 64,
        "guess_states": None if marks is None else range(marks.num_slots, plan.states),
    }  # fmt: skip


def in_slots(network: Network) -> SlotDrafting:
    cache, given = parts(network)
    decode_runner = make_draft_runner(network, cache, ROWS, VOCAB, None)
    decode_runner._event = Event
    return SlotDrafting(**given, decode_runner=decode_runner)


def asked(whom: int, prompt: Items[int], answer: Items[int], most: int) -> DraftRequest:
    params = HOW[whom % len(HOW)]
    return DraftRequest(whom, [*prompt, *answer], most, drawing=Drawing(params, 7 + whom, len(answer)))


def drafted(drafts: Drafting, asking: list[DraftRequest]) -> list[Guess]:
    """As many tokens as are asked for."""
    return drafts.guess(asking, lambda at, guess, texts: len(guess.tokens) < asking[at].most, saw)


def saw(texts: int, seconds: float) -> None:
    """Nobody counts."""


def test_a_chain_is_what_the_model_drafts_token_by_token(model: Network) -> None:
    """Whatever of it held, and however much was said since. The likeliest tokens are those of the plain modules."""
    slots, single, host, random = in_slots(model), in_slots(model), Drafting(**parts(model)[1]), Random(3)
    prompts = {whom: random.choices(range(VOCAB), k=5 + 13 * whom) for whom in range(3)}
    answers: dict[int, list[int]] = {whom: [] for whom in prompts}
    chains = dict.fromkeys(prompts, 0)
    for _ in range(5):
        going = [whom for whom in prompts if random.random() < 0.8] or [0]
        asking = [asked(whom, prompts[whom], answers[whom], random.choice([1, 2, 4])) for whom in going]
        found = drafted(slots, asking)
        slots.blocks.check()
        for whom, one, guess in zip(going, asking, found, strict=True):
            answer, chances = list(answers[whom]), list[float]()
            if guess.tokens:  # else it reads
                chains[whom] += 1
                while len(chances) < one.most:
                    (next_one,) = drafted(single, [asked(whom, prompts[whom], answer, 1)])
                    answer += next_one.tokens
                    chances += next_one.chances
                assert guess.tokens == tuple(answer[len(answers[whom]) :]), f"text {whom}"
                assert guess.chances == pytest.approx(chances, abs=1e-3)
                (plain,) = drafted(host, [one]) if whom == 0 else (NOTHING,)
                if plain.tokens:
                    assert guess.tokens == plain.tokens
                    assert guess.chances == pytest.approx(plain.chances, abs=1e-3)
            held = random.randint(0, len(guess.tokens))
            answers[whom] += [*guess.tokens[:held], random.randrange(VOCAB)]
    assert sum(chains.values()) > 5
    assert min(chains.values()) > 0
    for whom in prompts:
        slots.end(whom)
    assert slots.blocks.num_held == 0


def test_slots_go_to_who_asks(model: Network) -> None:
    drafts = in_slots(model)
    one = drafts.decode_runner.capacity
    texts = {whom: [whom % VOCAB, 2, 3] for whom in range(one + 2)}

    def guess(whom: int) -> Guess:
        return drafted(drafts, [DraftRequest(whom, texts[whom], 1)])[0]

    first = {whom: guess(whom).tokens for whom in texts}
    assert all(first.values())
    assert {whom: guess(whom).tokens for whom in texts} == first
    assert len(drafts._places) == one
    for whom in texts:
        drafts.end(whom)
    assert not drafts._places
    assert drafts.blocks.num_held == 0


def test_one_whose_output_is_no_number_is_told_of(model: Network) -> None:
    drafts = in_slots(model)
    drafts.decode_runner.sampler.drawn = lambda places: [SampledToken(-1) for _ in places]  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="its output is not a number"):
        drafted(drafts, [DraftRequest(1, [1, 2], 2)])
