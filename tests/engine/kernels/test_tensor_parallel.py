"""Decode steps of a network that two processes compute together, by the fused kernels, in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from engine.batch import NONE, StateMoves
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.cache.rows import Rows
from engine.cache.states import make_states
from engine.execute.cuda.all_reduce import AllReduce
from engine.execute.cuda.all_reduce_layout import AllReduceLayout
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.cuda.following import NullSampler
from engine.execute.cuda.fused_program import FusedDecoder, unsupported
from engine.execute.cuda.slots import Changes, DividedCheck, DividedStep, Slots
from engine.execute.cuda.tiles import FEW
from engine.execute.cuda.verify import Checking, GuessedRows
from engine.parallel.messages import of_decode, read_message
from engine.parallel.ring import ROOM, Ring
from engine.params import SamplingParams
from engine.sampling.device_sampler import DeviceSampler
from models.loading.load import load_model
from tests.engine.kernels.two_ranks import memory_in, run_ranks
from tests.models.checkpoints import (
    files_of,
    random_model,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)
from tests.models.families import tiny_bamba, tiny_qwen3_moe
from tests.models.hybrids import tiny_qwen3_5_moe

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
SLOTS = 20
QWEN3 = tiny_qwen3(num_hidden_layers=1, head_dim=64, vocab_size=27, hidden_size=64, intermediate_size=64)
EXPERTS = tiny_qwen3_moe(
    head_dim=64, vocab_size=27, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=1,
    num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
)  # fmt: skip
LLAMA = tiny_llama(
    num_hidden_layers=1,
    hidden_size=192,
    intermediate_size=96,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    attention_bias=True,
    vocab_size=27,
)


KINDS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
NETS = tiny_qwen3_5_moe(
    **KINDS, vocab_size=27, hidden_size=64, head_dim=64, num_attention_heads=4, num_key_value_heads=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
MAMBA = tiny_bamba(
    num_hidden_layers=2, attn_layer_indices=[1], vocab_size=27, hidden_size=64, intermediate_size=64,
    num_attention_heads=1, num_key_value_heads=1, mamba_n_heads=8, mamba_n_groups=4, mamba_d_state=16,
)  # fmt: skip


def logits_of(rank: int, ranks: int, path: Path, folder: Path, steps: list[list[int]]) -> list[Tensor]:
    """Logits [rows, vocab] of each step, of these slots. What is likeliest is taken, by the first rank alone."""
    network = load_model(
        files_of(path), dtype=torch.float32, device=CPU, rank=(rank, ranks), packs=lambda spec: True
    )
    assert unsupported(network) is None
    exchange = None
    if network.share is not None:
        plan = AllReduceLayout.of(network, SLOTS, 0)
        exchange = AllReduce(memory_in(folder, ranks, plan.nbytes), plan, rank, CPU, torch.float32, False)
        exchange.wait_at_most(60.0)
    spec = network.spec
    cache = KVCache(layer_rows(spec, torch.float32, CPU), 2 * SLOTS, 16, torch.float32, CPU)
    cache.states = make_states(spec, SLOTS, CPU)
    first, counts = rank == 0, [0] * SLOTS
    token = torch.arange(SLOTS) % 7 if first else torch.full((SLOTS,), -1)
    slots, found = Slots(SLOTS, 32, 2, token), []
    program = FusedDecoder(network, cache, slots.given, False, exchange=exchange)
    for slot in range(SLOTS):
        slots.put(slot, 0, 0)
        slots.show(slot, [2 * slot, 2 * slot + 1])
    for taken in steps:
        rows = next(count for count in (1, 4, 20) if count >= len(taken))
        slots.activate(taken, rows)
        for slot in taken if cache.states is not None else ():
            row = counts[slot]
            slots.move(slot, StateMoves(slot if row else NONE, row, ((row + 1, slot),)), row)
            counts[slot] += 1
        slots.send()
        logits = program.run(rows, 640)[: len(taken)].clone()
        if exchange is None:
            slots.given.counters[taken] += 1
        else:
            exchange.count(slots.given.active[:rows], slots.given.counters)
        if first:
            token[taken] = logits.argmax(-1)
        found.append(logits)
    return found


def each_logits(rank: int, ranks: int, folder: Path, asked: dict[str, list[list[int]]]) -> list[list[Tensor]]:
    """`logits_of` one model after the other, in the same processes: starting them takes longer than all else."""
    return [logits_of(rank, ranks, folder / name, folder / f"{name}-memory", asked[name]) for name in asked]


def test_two_ranks_have_the_logits_of_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3", QWEN3)
    write_checkpoint(tmp_path / "llama", LLAMA)
    write_gguf(tmp_path / "blocks.gguf", random_model(QWEN3), {
        "token_embd": GGUF.Q8_0, "attn_q": GGUF.Q8_0, "attn_k": GGUF.Q8_0, "attn_v": GGUF.Q8_0,
        "attn_output": GGUF.Q8_0, "ffn_gate": GGUF.Q4_0, "ffn_up": GGUF.Q4_0, "ffn_down": GGUF.Q8_0,
    })  # fmt: skip
    write_checkpoint(tmp_path / "experts", EXPERTS)
    write_checkpoint(tmp_path / "nets", NETS)
    write_checkpoint(tmp_path / "mamba", MAMBA)
    few, many = [[3], [3, 1, 0]], list(range(SLOTS))
    asked = {"qwen3": [*few, many, [3]], "llama": few, "blocks.gguf": few, "experts": [*few, many]}
    asked |= {"nets": [*few, many, [3]], "mamba": [*few, many, [3]]}
    for name in asked:
        (tmp_path / f"{name}-memory").mkdir()
    expected = each_logits(0, 1, tmp_path, asked)
    found, _ = run_ranks(2, each_logits, 2, tmp_path, asked)
    for name, ones, twos in zip(asked, expected, found, strict=True):
        for step, (one, two) in enumerate(zip(ones, twos, strict=True)):
            told = f"{name}, step {step}: "
            torch.testing.assert_close(
                two, one, rtol=1e-4, atol=2e-4, msg=lambda text, told=told: told + text
            )


@dataclass
class State:
    """The state of an answer, in slot 0; steps leave that after their first row."""

    seen: int

    @property
    def moves(self) -> StateMoves:
        return StateMoves(0, self.seen, ((self.seen + 1, 0),))


class Answer:
    """A sequence as the runner has it."""

    def __init__(self, prompt: list[int], state: State | None) -> None:
        self.rows, self.params, self.seed = Rows.of(prompt), SamplingParams(temperature=2.0), 1
        self.rows.next_position += 3  # as after a think span that was taken out
        self.table: Any = SimpleNamespace(blocks=[2, 3], first=0, firsts=[], state=state)
        self.generated: list[int] = []

    def allow(self, words: Any, drawn: int | None = None) -> None:
        raise AssertionError("nothing is constrained")


class Now:
    """An event on a device that does everything at once."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def runner_of(rank: int, ranks: int, path: Path, folder: Path) -> tuple[DecodeRunner[Answer], State | None]:
    network = load_model(files_of(path), dtype=torch.float32, device=CPU, rank=(rank, ranks))
    vocab, exchange = network.whole.vocab_size, None
    sampler: DeviceSampler | NullSampler = DeviceSampler(vocab, 2, CPU)
    if network.share is not None:
        plan = AllReduceLayout.of(network, FEW, 0)
        exchange = AllReduce(memory_in(folder, ranks, plan.nbytes), plan, rank, CPU, torch.float32, False)
        exchange.wait_at_most(60.0)
        if rank:
            sampler = NullSampler(vocab, 2, CPU, exchange.count)
    cache = KVCache(layer_rows(network.spec, torch.float32, CPU), 8, 16, torch.float32, CPU)
    cache.states = make_states(network.spec, 1, CPU)
    states = [] if cache.states is None else cache.states.layers.values()
    for part in (*cache.parts, *states):
        part.zero_()  # the row of the prompt was never computed
    slots = Slots(2, 2, 2, sampler.token)
    program = FusedDecoder(network, cache, slots.given, False, exchange=exchange)
    checking = (
        Checking(program, sampler, slots, 16)
        if isinstance(sampler, DeviceSampler)
        else GuessedRows(program, slots, 16)
    )
    found: DecodeRunner[Answer] = DecodeRunner(program, sampler, slots, 32, None, Now, checking)
    found.prepare()
    return found, None if cache.states is None else State(1)


def decoded(
    rank: int, ranks: int, path: Path, folder: Path, ring: Path, count: int, guesses: list[tuple[int, ...]]
) -> list[int]:
    """The tokens after a first one, by runners of which only the first is asked: of a step for each of `guesses`, and
    of `count` steps before and after those."""
    runner, state = runner_of(rank, ranks, path, folder)
    with ring.open("r+b") as file:
        messages = Ring(file.fileno())
    tokens: list[int] = []
    if rank:
        for _ in range(1 + 2 * count + len(guesses)):
            step: Any = read_message(messages.take(lambda: sleep(0.01)))
            runner.follow(step)
        return tokens
    if ranks > 1:

        @contextmanager
        def together(step: DividedStep | DividedCheck) -> Iterator[None]:
            messages.put(of_decode(step), 60.0)
            yield

        runner.together = together
    runner._ahead = [(2, 640, runner.sampler.draw([0]))]
    assert not runner.while_idle()
    answer = Answer([5], state)
    first = torch.zeros(runner.sampler.vocab_size)
    first[9] = 100.0
    runner.join(answer, first)

    @contextmanager
    def leaving_state() -> Iterator[None]:
        row = runner._seats[answer].row
        yield
        if state is not None:
            state.seen = row + 1

    def launch() -> None:  # always a step ahead of what is read
        for _ in range(count):
            with leaving_state():
                runner.launch([answer])
            tokens.extend(token.token_id for _, token in runner.read())

    launch()
    if guesses:
        tokens.extend(token.token_id for _, token in runner.read())
    for guessed in guesses:
        with leaving_state():
            ((_, drawn),) = runner.check([(answer, guessed)], lambda sequence, error: None)
        tokens += [token.token_id for token in drawn]
    launch()
    return tokens


@pytest.mark.parametrize("config", [QWEN3, NETS], ids=["qwen3", "nets"])
def test_a_runner_that_is_told_follows_the_one_that_draws(tmp_path: Path, config: Any) -> None:
    """Also while both prepare: a step more on one of them, and they would wait for each other."""
    path, ring = write_checkpoint(tmp_path / "model", config), tmp_path / "ring"
    ring.write_bytes(bytes(2 * ROOM))
    truth = decoded(0, 1, path, tmp_path, ring, 8, [])
    assert truth[0] == 9
    wrong = [(token + 1) % 27 for token in truth]
    guesses = [(truth[5], truth[6], wrong[7]), (wrong[8],), (truth[9],)]
    together, nothing = run_ranks(2, decoded, 2, path, tmp_path, ring, 4, guesses)
    assert together == truth[: len(together)]
    assert len(together) == 15
    assert len(set(together)) > 5
    assert not nothing


def test_who_follows_is_told_what_has_changed() -> None:
    """A rank that gets nothing but the messages has the same numbers in its slots, wherever rank 0 changed some."""
    told, followed = (Slots(3, 4, 5, torch.zeros(3, dtype=torch.int64)) for _ in range(2))
    for blocks, row in (([4, 7], 20), ([4, 7, 9], 40), ([4, 7, 9, 1], 50)):
        told.put(1, row, row + 3)
        told.show(1, blocks)
        told.activate([1, 2], 2)
        told.share([row, 0], [[1, 0], [2]])
        sent = told.send()
        step = read_message(of_decode(DividedStep(sent, 2, 640, row)))
        assert step == DividedStep(sent, 2, 640, row)
        assert isinstance(step, DividedStep)
        followed.change(step.changes)
        assert torch.equal(told._words, followed._words)
        assert torch.equal(told.given.counters, followed.given.counters)


@given(
    st.dictionaries(st.integers(0, 2**40), st.integers(-1, 2**31)),
    st.dictionaries(st.integers(0, 2**40), st.integers(-1, 2**31)),
    st.lists(
        st.tuples(st.integers(0, 255), st.lists(st.integers(0, 2**31), max_size=7).map(tuple)), max_size=4
    ),
)
def test_a_step_of_guesses_is_told_whole(
    words: dict[int, int], counters: dict[int, int], spans: list[tuple[int, tuple[int, ...]]]
) -> None:
    step = DividedCheck(Changes(words, counters), 8, 640, tuple(spans))
    assert read_message(of_decode(step)) == step


def test_a_follower_counts_where_rank_0_samples() -> None:
    counted: list[Tensor] = []
    counting = NullSampler(11, 2, CPU, lambda active, counters: counted.append(counters))
    counters = torch.zeros(2, 2)
    counting.sample(torch.zeros(1, 11), torch.zeros(1), None)
    assert not counted, "as where the first token of an answer is drawn"
    counting.sample(torch.zeros(1, 11), torch.zeros(1), counters, counting.draw([0]))
    assert counted == [counters]
