"""Networks with recurrent layers on a GPU: decode steps are fused, and states are what row by row makes of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import SamplingParams
from engine.batch import StateMoves
from engine.cache.host_memory import PromptCosts
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.cache.states import make_states
from engine.engine import Engine
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import context_limit
from models.loading.load import load_model
from models.network import Network
from models.recurrences import DeltaNet
from models.spec import kv_sources
from tests.engine.keeping import answer, keep, saved
from tests.gpu.engines import (
    DEVICE,
    alone,
    an_engine,
    at_once,
    check_guesses,
    forget,
    one_after_the_other,
    random_tokens,
)
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import tiny_falcon_h1, tiny_granite_hybrid, tiny_nemotron_h
from tests.models.hybrids import tiny_qwen3_5, tiny_qwen3_5_moe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

BLOCK = 32
SIZES: dict[str, Any] = {
    "vocab_size": 272, "max_position_embeddings": 2048, "hidden_size": 512, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "vocab_size": 272, "max_position_embeddings": 2048, "hidden_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 1, "mamba_n_heads": 16, "mamba_n_groups": 1, "mamba_d_state": 128,
    "intermediate_size": 64, "shared_intermediate_size": 64,
}  # fmt: skip
HEADS: dict[str, Any] = {
    "vocab_size": 272, "max_position_embeddings": 2048, "hidden_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 1024,
}  # fmt: skip
NEMOTRON: dict[str, Any] = HEADS | {
    "mamba_num_heads": 16, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 4, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
FALCON: dict[str, Any] = HEADS | {
    "mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_n_groups": 1, "mamba_d_state": 256
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "dense": tiny_qwen3_5(**SIZES, intermediate_size=1024),
    "experts": tiny_qwen3_5_moe(**SIZES, moe_intermediate_size=64, shared_expert_intermediate_size=64),
    "mamba": tiny_granite_hybrid(**MAMBA),
    "nemotron": tiny_nemotron_h(**NEMOTRON),
    "falcon": tiny_falcon_h1(**FALCON),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, speculation="auto")


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(folder, CONFIGS[request.param], dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with an_engine(folder, attention="triton", block_size=BLOCK, streams=64) as engine:
        assert engine.figures().decode.startswith("fused kernels"), engine.figures().notes
        yield engine


class Steps:
    """Decode steps of texts that begin with a state and rows of random numbers."""

    def __init__(self, network: Network, texts: int, rows: int = 600) -> None:
        from engine.execute.cuda.fused_program import FusedDecoder

        spec, dtype, blocks = network.spec, network.dtype, -(-rows // BLOCK)
        cache = KVCache(
            layer_rows(spec, dtype, DEVICE), texts * blocks, BLOCK, dtype, DEVICE, sources=kv_sources(spec)
        )
        cache.states = make_states(spec, 2 * texts, DEVICE)
        assert cache.states is not None
        random = torch.Generator(DEVICE).manual_seed(1)
        for part in cache.parts:
            part.normal_(generator=random)
        for states in cache.states.layers.values():
            states.normal_(std=0.05, generator=random)
        self.cache, self.texts = cache, texts
        self.held = Slots(texts, 256, blocks, torch.randint(272, (texts,), device=DEVICE, generator=random))
        for slot in range(texts):
            self.held.put(slot, 0, 0)
            self.held.show(slot, range(slot * blocks, (slot + 1) * blocks))
        self.program = FusedDecoder(network, cache, self.held.given, pdl=True)

    @torch.inference_mode()
    def run(self, slots: list[int], rows: int, at: int, moves: StateMoves | None = None) -> Tensor:
        """Compute row `at` of these texts: from the states 0, 1, ... to those `texts` further, unless `moves` says
        others."""
        for slot in slots:
            self.held.place(slot, at, at)
            own = StateMoves(slot, at, ((at + 1, self.texts + slot),)) if moves is None else moves
            self.held.move(slot, own, at)
        self.held.activate(slots, rows)
        self.held.send()
        return self.program.run(rows, context_limit(at))[: len(slots)].clone()

    def state(self, slot: int) -> list[Tensor]:
        """Return the states in a slot."""
        assert self.cache.states is not None
        return [each[slot].clone() for each in self.cache.states.layers.values()]


@pytest.fixture(scope="module")
def network(folder: Path) -> Network:
    return load_model(files_of(folder), dtype=torch.bfloat16, device=DEVICE)


def test_a_row_has_the_bits_that_it_has_alone(network: Network) -> None:
    steps = Steps(network, 8)
    together, after = steps.run(list(range(8)), 8, 500), [steps.state(8 + slot) for slot in range(8)]
    assert together.isfinite().all()
    for slot in range(8):
        assert torch.equal(steps.run([slot], 1, 500)[0], together[slot])
        assert all(map(torch.equal, steps.state(8 + slot), after[slot]))


def test_a_state_has_the_same_bits_through_the_log(network: Network) -> None:
    steps = Steps(network, 4)
    steps.run([0], 1, 300)
    for row in range(301, 340):
        found = steps.run([0], 1, row, StateMoves(4, row, ((row + 1, 4),)))
    direct = steps.state(4)
    replayed = steps.run([0], 1, 339, StateMoves(0, 300, ((340, 5),)))
    assert torch.equal(found, replayed)
    assert all(map(torch.equal, steps.state(5), direct))


def test_steps_of_many_rows_are_close_to_those_of_few(network: Network) -> None:
    steps = Steps(network, 64)
    few = torch.cat([steps.run(list(range(first, first + 8)), 8, 500) for first in range(0, 64, 8)])
    states = [steps.state(64 + slot)[0] for slot in (0, 63)]
    many = steps.run(list(range(64)), 64, 500)
    errors = (many - few).float().abs().amax(1) / few.float().abs().amax(1)
    assert errors.median() < 0.03, "in bf16 transformers is off by as much"
    assert int((errors > 0.1).sum()) <= 4, "where other experts are chosen, few rows may differ by more"
    for wanted, slot in zip(states, (0, 63), strict=True):
        assert (steps.state(64 + slot)[0] - wanted).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize("folder", ["dense"], indirect=True)
def test_the_first_delta_net_is_that_of_the_plain_modules(network: Network) -> None:
    """Its y, from one state and one log, in bf16."""
    from engine.execute.cuda.prefill import Projected
    from engine.execute.cuda.recurrence import recur
    from models.reference import delta_net

    steps, layer = Steps(network, 2), 0
    spec, weights = network.spec.layers[layer].mixer, network.layers[layer].mixer
    assert isinstance(spec, DeltaNet)
    random = torch.Generator(DEVICE).manual_seed(3)

    def draw(size: int) -> Tensor:
        return torch.randn(1, size, dtype=torch.bfloat16, device=DEVICE, generator=random)

    given, gates = draw(spec.conv_size + spec.output_size), draw(2 * spec.value_heads)
    steps.run([1], 1, 400)  # says where everything is
    state = steps.state(1)[0]
    log = steps.cache.k[layer].flatten(1)
    first = 19 * BLOCK + 400  # the blocks of the second text begin there
    rows = torch.cat((log[first - 3 : first], torch.cat((given[:, : spec.conv_size], gates), dim=-1)))
    y, after = delta_net.walk(spec, weights, rows, state)
    wanted = delta_net.gated_norm(spec, weights, y, given[:, spec.conv_size :])
    out = torch.empty(1, spec.output_size, dtype=torch.bfloat16, device=DEVICE)
    recur(spec, weights, steps.held.given, steps.cache, layer, Projected(given, gates), out, True)
    torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(steps.state(3)[0], after, rtol=1e-4, atol=1e-5)


def test_answers_beside_each_other_are_those_alone(engine: Engine) -> None:
    """The prompts are so short that none is cut, whatever decodes beside it."""
    jobs = [(random_tokens(count, count), GREEDY) for count in (16, 9, 7, 13)]
    forget(engine)
    found = one_after_the_other(engine, jobs)
    forget(engine)
    assert [alone(engine, job) for job in jobs] == found


def test_an_answer_goes_on_where_it_was_stopped(engine: Engine) -> None:
    prompt = random_tokens(200, 9)
    said = alone(engine, (prompt, GREEDY))
    for taken in (1, 30, 60):
        assert answer(engine, [*prompt, *said[:-taken]], GREEDY)[1] == 1, "one row is computed"


def test_right_and_wrong_guesses_change_nothing(engine: Engine) -> None:
    jobs = [(random_tokens(count, 2 * count), GREEDY) for count in (100, 41, 300)]
    check_guesses(engine, jobs)


def test_many_streams(engine: Engine) -> None:
    forget(engine)
    jobs = [(random_tokens(20 + count, 100 + count), GREEDY) for count in range(64)]
    found = at_once(engine, jobs)
    assert all(len(tokens) == 80 for tokens in found)


def test_after_a_restart_a_conversation_goes_on_from_its_state(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptCosts, "worth_it", True)
    prompts = [random_tokens(300 + 50 * number, number) for number in range(3)]
    with an_engine(folder, attention="triton", block_size=BLOCK) as engine:
        keep(engine, tmp_path)
        for number, prompt in enumerate(prompts):
            engine.warm(prompt)
            saved(engine, f"talk-{number}", prompt)
        expected = [answer(engine, [*prompt, 7, 8, 9], GREEDY)[0] for prompt in prompts]
    with an_engine(folder, attention="triton", block_size=BLOCK) as engine:
        tier = keep(engine, tmp_path)
        for prompt, said in zip(prompts, expected, strict=True):
            assert answer(engine, [*prompt, 7, 8, 9], GREEDY) == (said, 3)
        assert (tier.restored, tier.problem) == (sum(map(len, prompts)), "")


@pytest.mark.parametrize("options", [{}, {"max_chunk": 97}, {"graphs": False}], ids=str)
def test_with_deterministic_nothing_changes_a_text(folder: Path, options: dict[str, Any]) -> None:
    """Alone, partly cached, split, all at once, more than eight of them, preempted and computed again."""
    given: dict[str, Any] = {"attention": "triton", "block_size": BLOCK, "deterministic": True, "streams": 16}
    params = SamplingParams(temperature=0.8, max_tokens=60, speculation="auto")
    jobs = [(random_tokens(40 + 90 * n, n), replace(params, seed=n)) for n in range(14)]
    with an_engine(folder, **given) as engine:
        expected = []
        for job in jobs:
            forget(engine)
            expected.append(alone(engine, job))
        assert at_once(engine, jobs) == expected, "their prompts are cached"
        forget(engine)
        for n, (prompt, _) in enumerate(jobs):
            engine.warm(prompt[: (n * 37) % len(prompt)])
        assert [alone(engine, job) for job in jobs] == expected
    with an_engine(folder, **given | options) as engine:
        assert at_once(engine, jobs) == expected
    with an_engine(folder, **given | options, context=1400, num_blocks=100, offload=0) as engine:
        assert at_once(engine, jobs) == expected


def drop_marks(engine: Engine, row: int) -> None:
    """Give up all states after row `row` of any path."""
    marks = engine.pieces.blocks.marks
    assert marks is not None
    for mark in [mark for mark in marks if mark.row > row]:
        marks.drop(mark)


@pytest.mark.parametrize("count", [60, 200])
def test_with_deterministic_what_follows_an_answer_has_the_bits_of_its_steps(
    folder: Path, count: int
) -> None:
    """From the state that decode steps left, and from that of the prompt by the log: some rows, and more of them than a
    recorded prompt reads again."""
    prompt, told = random_tokens(300, 1), replace(GREEDY, logprobs=0)
    with an_engine(folder, attention="triton", block_size=BLOCK, deterministic=True) as engine:
        said = alone(engine, (prompt, SamplingParams(temperature=0.0, max_tokens=count)))
        text = [*prompt, *said[:-1], 7, 8, 9]
        expected = answer(engine, text, told)
        engine.loop.call(lambda: drop_marks(engine, len(prompt)))
        assert answer(engine, text, told)[0] == expected[0]
