"""Decode steps as each of several ranks computes them, by the fused kernels. It imports little, as forked ranks do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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
from engine.execute.cuda.slots import DividedCheck, DividedStep, Slots
from engine.execute.cuda.tiles import FEW
from engine.execute.cuda.verify import Checking, GuessedRows
from engine.parallel.messages import of_decode, read_message
from engine.parallel.ring import Ring
from engine.params import SamplingParams
from engine.sampling.device_sampler import DeviceSampler
from models.files import ModelFiles
from models.loading.load import load_model
from tests.engine.kernels.two_ranks import memory_in

CPU = torch.device("cpu")
SLOTS = 20


def logits_of(rank: int, ranks: int, files: ModelFiles, folder: Path, steps: list[list[int]]) -> list[Tensor]:
    """Logits [rows, vocab] of each step, of these slots. What is likeliest is taken, by the first rank alone."""
    network = load_model(files, dtype=torch.float32, device=CPU, rank=(rank, ranks), packs=lambda spec: True)
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


def each_logits(
    rank: int, ranks: int, folder: Path, asked: list[tuple[ModelFiles, list[list[int]]]]
) -> list[list[Tensor]]:
    """`logits_of` one model after the other, in the same processes."""
    return [logits_of(rank, ranks, files, folder / f"{files.name}-memory", steps) for files, steps in asked]


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


def runner_of(
    rank: int, ranks: int, files: ModelFiles, folder: Path
) -> tuple[DecodeRunner[Answer], State | None]:
    network = load_model(files, dtype=torch.float32, device=CPU, rank=(rank, ranks))
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
    rank: int,
    ranks: int,
    files: ModelFiles,
    folder: Path,
    ring: Path,
    count: int,
    guesses: list[tuple[int, ...]],
) -> list[int]:
    """The tokens after a first one, by runners of which only the first is asked: of a step for each of `guesses`, and
    of `count` steps before and after those."""
    runner, state = runner_of(rank, ranks, files, folder)
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
