"""Steps of networks with recurrent layers, against the plain modules: in fp32 and in Triton's interpreter."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.attention import flash
from engine.attention.choose import make_backend
from engine.attention.sdpa import SdpaBackend
from engine.attention.unusual import unusual_layers
from engine.batch import NONE, Span, StateMoves, StepBatch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.cache.states import make_states
from engine.execute.compatibility import not_fused
from engine.execute.cuda.fused_program import FusedDecoder, unsupported
from engine.execute.cuda.prefill import FusedPrefill
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.step_bench import StepBench
from engine.execute.cuda.tiles import context_limit
from engine.execute.cuda.verify import GuessedRows
from models.loading.load import load_model
from models.network import Network
from models.recurrences import DeltaNet, Mamba2, Recurrence
from models.reference.decoder import Decoder
from models.spec import Attention, Experts, FeedForward, Layer, ModelSpec, Norm, Rope
from tests.covering import each_value_once
from tests.engine import fake_flash
from tests.engine.hybrid import hybrid_network
from tests.engine.kernels.test_tuned_steps import Watch
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import tiny_falcon_h1, tiny_granite_hybrid, tiny_nemotron_h
from tests.models.hybrids import tiny_qwen3_5

CPU = torch.device("cpu")
BLOCK, LENGTHS, STATES = 16, [78, 40, 3], 12
NORM = Norm(offset=1.0)
FEED = FeedForward(48)
NET = Layer(DeltaNet(2, 4, 16, 32), FEED, NORM, feed_forward_norm=NORM)
TURNED = replace(NET, mixer=DeltaNet(2, 6, 32, 24, conv_width=3, alternating=True))
PLAIN = Layer(
    Attention(2, 1, 64, rope=Rope(dims=32), head_norm=NORM, gate="numbers"),
    FEED,
    NORM,
    feed_forward_norm=NORM,
)
SPACES = replace(NET, mixer=Mamba2(4, 32, 16, step_limits=(0.01, 0.9)))
BARE = replace(NET, mixer=Mamba2(4, 16, 32, 2, conv_bias=False, norm_eps=None))
HALVES = [replace(each, feed_forward=None, feed_forward_norm=None) for each in (SPACES, PLAIN)] + [
    replace(NET, mixer=None, attention_norm=None)
]
GROUPED = replace(NET, mixer=Mamba2(6, 24, 32, 3))
FIRST = replace(NET, mixer=Mamba2(4, 32, 16, 2, norms_first=True))
BESIDE = [
    replace(HALVES[0], mixer=Mamba2(2, 40, 256, multipliers=(0.3, 1.5, 2.0, 0.7, 1.2)), residual_scale=0.75),
    replace(HALVES[1], beside=True, attention_norm=None),
    replace(HALVES[1], attention_norm=Norm(1e-5)),
    replace(
        HALVES[0],
        mixer=replace(FIRST.mixer, multipliers=(0.3, 1.0, 1.0, 1.0, 1.2)),
        beside=True,
        attention_norm=None,
    ),
]
SQUARED = Experts(
    6,
    2,
    FeedForward(40, "relu2", gated=False),
    scoring="sigmoid",
    exact_router=True,
    selection_bias=True,
    scale=2.5,
    shared=FeedForward(24, "relu2", gated=False),
)
EXPERTS = Experts(6, 2, FeedForward(40), shared=FeedForward(24), shared_gate=True)
SPECS = {
    "usual": ModelSpec("Hybrid", 272, 64, 1024, (NET, PLAIN, NET), NORM),
    "alternating": ModelSpec("Hybrid", 272, 64, 1024, (TURNED, PLAIN), NORM),
    "mamba": ModelSpec("Hybrid", 272, 64, 1024, (SPACES, PLAIN, BARE), NORM),
    "groups": ModelSpec("Hybrid", 272, 64, 1024, (GROUPED, PLAIN, FIRST), NORM),
    "beside": ModelSpec("Hybrid", 272, 64, 1024, (*BESIDE[:2], HALVES[2], *BESIDE[2:]), NORM),
    "halves": ModelSpec(
        "Hybrid", 272, 64, 1024, (*HALVES, HALVES[0], replace(HALVES[2], feed_forward=SQUARED)), NORM
    ),
    "experts": ModelSpec(
        "Hybrid",
        272,
        64,
        1024,
        (
            replace(NET, feed_forward=EXPERTS),
            replace(PLAIN, mixer=replace(PLAIN.attention, gate="heads"), feed_forward=EXPERTS),
        ),
        NORM,
    ),
}
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/gpu runs them; fp32 is known in the interpreter only"
    ),
    pytest.mark.usefixtures("few_programs"),
]


def cache_of(network: Network) -> KVCache:
    """A cache whose memory is NaN wherever nobody has written."""
    cache = KVCache(layer_rows(network.spec, torch.float32, CPU), 24, BLOCK, torch.float32, CPU)
    cache.states = make_states(network.spec, STATES, CPU)
    for tensor in (*cache.parts, *(cache.states.layers.values() if cache.states is not None else ())):
        tensor.fill_(float("nan"))
    return cache


def copied(given: KVCache, network: Network) -> KVCache:
    cache = cache_of(network)
    pairs = list(zip(cache.parts, given.parts, strict=True))
    assert cache.states is not None
    assert given.states is not None
    pairs += zip(cache.states.layers.values(), given.states.layers.values(), strict=True)
    for to, source in pairs:
        to.copy_(source)
    return cache


def states(cache: KVCache, slot: int) -> list[Tensor]:
    assert cache.states is not None
    return [each[slot].clone() for each in cache.states.layers.values()]


def log(cache: KVCache, network: Network, table: tuple[int, ...], row: int) -> list[Tensor]:
    place = table[row // BLOCK] * BLOCK + row % BLOCK
    nets = [i for i, layer in enumerate(network.spec.layers) if isinstance(layer.mixer, Recurrence)]
    return [cache.k[layer][place].clone() for layer in nets]


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and a cache with three texts but for their last tokens. State i is that of text i, and 3 + i that of
    seven rows before, if it has so many."""

    network: Network
    cache: KVCache
    tables: list[tuple[int, ...]]
    texts: list[list[int]]
    last: Tensor
    """Logits of the last token of each text."""
    after: list[list[Tensor]]
    """The states after it."""
    logged: list[list[Tensor]]
    """What its row gives to the recurrences."""


@pytest.fixture(scope="module", params=list(SPECS))
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(hybrid_network(SPECS[request.param]))


def case_of(network: Network) -> Case:
    random = torch.Generator().manual_seed(1)
    blocks = iter(torch.randperm(24, generator=random).tolist())
    tables = [tuple(next(blocks) for _ in range(length // BLOCK + 2)) for length in LENGTHS]
    texts = [torch.randint(272, (length + 1,), generator=random).tolist() for length in LENGTHS]
    cache, model = cache_of(network), Decoder(network)

    def run(cache: KVCache, text: list[int], table: tuple[int, ...], start: int, moves: StateMoves) -> Tensor:
        step = SdpaBackend(cache, unusual_layers(network)).plan(
            StepBatch((Span(table, start, len(text), states=moves),))
        )
        return model.logits(model.forward(torch.tensor(text), torch.arange(start, start + len(text)), step))[
            -1
        ]

    last, after, logged = [], [], []
    with torch.inference_mode():
        for number, (table, text) in enumerate(zip(tables, texts, strict=True)):
            count = len(text) - 1
            saves = ((count - 7, 3 + number), (count, number))[int(count < 7) :]
            run(cache, text[:-1], table, 0, StateMoves(NONE, 0, saves))
            scratch = copied(cache, network)
            last.append(run(scratch, text[-1:], table, count, StateMoves(number, count, ((count + 1, 11),))))
            after.append(states(scratch, 11))
            logged.append(log(scratch, network, table, count))
    return Case(network, cache, tables, texts, torch.stack(last), after, logged)


def slots_of(case: Case, moves: dict[int, StateMoves]) -> Slots:
    held = Slots(3, 32, 12, torch.tensor([text[-1] for text in case.texts]))
    for slot, (table, length) in enumerate(zip(case.tables, LENGTHS, strict=True)):
        held.put(slot, length, length)
        held.show(slot, table)
        if slot in moves:
            held.move(slot, moves[slot], length)
    return held


def stay(case: Case, slot: int, target: int) -> StateMoves:
    """Go on from the end of a text."""
    return StateMoves(slot, LENGTHS[slot], ((LENGTHS[slot] + 1, target),))


def decoded(case: Case, slots: list[int], rows: int, moves: dict[int, StateMoves]) -> tuple[Tensor, KVCache]:
    cache = copied(case.cache, case.network)
    held = slots_of(case, moves)
    held.activate(slots, rows)
    held.send()
    with torch.inference_mode():
        program = FusedDecoder(case.network, cache, held.given, pdl=False)
        return program.run(rows, context_limit(max(LENGTHS)))[: len(slots)].clone(), cache


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@each_value_once
@pytest.mark.parametrize("rows", [4, 32])
def test_a_step_gives_what_the_plain_modules_give(case: Case, rows: int) -> None:
    assert not_fused(case.network.spec) is None
    slots = [0, 2, 1]
    moves = {slot: stay(case, slot, target) for slot, target in zip(slots, (0, 9, 10), strict=True)}
    logits, cache = decoded(case, slots, rows, moves)
    torch.testing.assert_close(logits, case.last[slots], rtol=1e-4, atol=2e-4)
    for slot in slots:
        target = moves[slot].saves[0][1]
        close(states(cache, target), case.after[slot])
        close(log(cache, case.network, case.tables[slot], LENGTHS[slot]), case.logged[slot])
    for slot in (1, 2, 3, 4):  # of marks, which others may read
        assert all(map(torch.equal, states(cache, slot), states(case.cache, slot)))
    if rows == 4:
        alone, other = decoded(case, [2], 1, {2: stay(case, 2, 9)})
        assert torch.equal(alone[0], logits[1])
        assert all(map(torch.equal, states(other, 9), states(cache, 9)))


def test_a_step_reaches_its_state_from_an_earlier_one_through_the_log(case: Case) -> None:
    length = LENGTHS[1]
    moves = {1: StateMoves(4, length - 7, ((length + 1, 9),))}
    logits, cache = decoded(case, [1], 1, moves)
    torch.testing.assert_close(logits[0], case.last[1], rtol=1e-4, atol=2e-4)
    close(states(cache, 9), case.after[1])


def test_a_step_may_begin_with_the_first_rows_of_a_text(case: Case) -> None:
    logits, cache = decoded(case, [2], 1, {2: StateMoves(NONE, 0, ((4, 9),))})
    torch.testing.assert_close(logits[0], case.last[2], rtol=1e-4, atol=2e-4)
    close(states(cache, 9), case.after[2])


@each_value_once
@pytest.mark.parametrize("held", [0, 2])
def test_guesses_have_the_bits_of_single_steps_and_so_has_what_follows(case: Case, held: int) -> None:
    """Two texts, one of whose guesses cross the end of a block; then a step after so many right guesses."""
    guessed = {0: (7, 9, 11), 1: (5, 6)}
    place = {0: 0, 1: 4}
    cache = copied(case.cache, case.network)
    slots = slots_of(case, {slot: stay(case, slot, 6 + slot) for slot in guessed})
    with torch.inference_mode():
        program = FusedDecoder(case.network, cache, slots.given, pdl=False)
        checks: Any = GuessedRows(program, slots, BLOCK)
        slots.send()
        checks.plan(list(guessed.items()))
        checks.compute(8, context_limit(max(LENGTHS)))
        together = checks._logits[8].clone()
        for slot, guesses in guessed.items():
            row, tokens = LENGTHS[slot], [case.texts[slot][-1], *guesses]
            slots.place(slot, row + 1 + held, row + 1 + held)
            slots.move(slot, StateMoves(6 + slot, row + 1, ((row + 2 + held, 6 + slot),)), row + 1 + held)
            slots.given.token[slot] = 40 + held
            slots.activate([slot], 1)
            slots.send()
            then = program.run(1, context_limit(max(LENGTHS)))[0].clone()
            # The same row by row.
            single, alone = copied(case.cache, case.network), slots_of(case, {slot: stay(case, slot, 9)})
            other = FusedDecoder(case.network, single, alone.given, pdl=False)
            for step, token in enumerate([*tokens[: 1 + held], 40 + held]):
                alone.given.token[slot] = token
                alone.place(slot, row + step, row + step)
                moves = StateMoves(slot if step == 0 else 9, row + step, ((row + step + 1, 9),))
                alone.move(slot, moves, row + step)
                alone.activate([slot], 1)
                alone.send()
                found = other.run(1, context_limit(max(LENGTHS)))[0]
                if step <= held:
                    assert torch.equal(found, together[place[slot] + step])
            assert torch.equal(found, then)
            assert all(map(torch.equal, states(single, 9), states(cache, 6 + slot)))


KINDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SIZES = {
    "vocab_size": 272,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
SIZES |= {"intermediate_size": 128}
PACKED: dict[Any, dict[str, Any]] = {
    tiny_qwen3_5: KINDS
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    | {"linear_value_head_dim": 32},
    tiny_granite_hybrid: KINDS
    | {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
    | {"num_local_experts": 0, "shared_intermediate_size": 128},
    tiny_nemotron_h: {
        "mamba_num_heads": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_group": 1,
        "topk_group": 1,
    }
    | {"moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128},
    tiny_falcon_h1: {"num_hidden_layers": 1, "mamba_n_heads": 8, "mamba_n_groups": 2}
    | {"mamba_d_ssm": 128, "mamba_d_state": 16},
}


@pytest.mark.parametrize("config", PACKED)
def test_weights_may_be_packed(tmp_path: Path, config: Any) -> None:
    sizes = SIZES | PACKED[config]
    files = files_of(write_checkpoint(tmp_path, config(**sizes)))
    given: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "quantize": "int4"}
    blocks, packed = load_model(files, **given), load_model(files, packs=lambda spec: True, **given)
    assert packed.is_packed
    assert unsupported(packed) is None
    case = case_of(blocks)
    moves = {1: stay(case, 1, 9), 0: stay(case, 0, 8)}
    logits, cache = decoded(replace(case, network=packed), [1, 0], 2, moves)
    torch.testing.assert_close(logits, case.last[[1, 0]], rtol=1e-3, atol=1e-3)
    close(states(cache, 9), case.after[1])


@each_value_once
@pytest.mark.parametrize("name", ["triton", "flash"])
def test_every_backend_walks_through_recurrences(
    case: Case, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The last token of each text in one step, by the kernels for prompts."""
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    for module in (flash, fake_flash):
        monkeypatch.setattr(module, "PAGE", BLOCK)
    cache = copied(case.cache, case.network)
    spans = tuple(
        Span(table, end, 1, text[-1:], (end,), 1, states=stay(case, slot, 6 + slot))
        for slot, (table, end, text) in enumerate(zip(case.tables, LENGTHS, case.texts, strict=True))
    )
    ids = torch.tensor([token for span in spans for token in span.tokens])
    model, step = FusedPrefill(case.network), make_backend(name, cache).plan(StepBatch(spans))
    with torch.inference_mode():
        logits = model.logits(model.forward(ids, torch.tensor(LENGTHS), step))
    torch.testing.assert_close(logits, case.last, rtol=1e-4, atol=2e-4)
    close(states(cache, 7), case.after[1])


def test_steps_are_timed_beside_the_states_of_the_sequences(case: Case) -> None:
    cache = copied(case.cache, case.network)
    bench = StepBench(case.network, cache, lambda job: job(), None, Watch(lambda cuts: 1e-3), row=20)
    assert bench.candidates(1)
    assert bench._cache is not None
    assert bench._cache.states is not None
    assert all(bool(each[0].any()) for each in bench._cache.states.layers.values()), "its own"
    assert all(map(torch.equal, states(cache, 0), states(case.cache, 0)))
    (row,) = map(cache.group_bytes, cache.every_group)
    assert cache.states is not None
    assert StepBench.cache_bytes(cache) - cache.states.nbytes // STATES == row * context_limit(0)
