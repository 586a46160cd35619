"""Steps that check guesses, in Triton's interpreter: what is drawn, written and kept is that of steps of one row."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from transformers import MistralConfig

pytest.importorskip("triton")

from engine.cache.block_table import BlockTable
from engine.cache.rows import Rows
from engine.errors import EngineError
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import FEW
from engine.execute.cuda.verify import PART, Checking
from engine.kernels.triton.verify_rows import follow_kernel, spread_kernel
from engine.params import Constraint, SamplingParams
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SampledToken
from engine.schedule.forced_tokens import permitted
from engine.schedule.guide import Guide
from engine.schedule.output import Output
from engine.schedule.reasoning import ThinkTracker
from engine.schedule.sequence import Priority, Sequence
from models.loading.load import load_model
from models.network import Network
from tests.covering import each_value_once
from tests.engine.fake_decoding import mixed
from tests.engine.kernels.test_rows import BLOCK, BLOCKS, DEVICE, SLOTS, Case
from tests.engine.schedule_world import tokenizer
from tests.engine.test_decode_runner import Event
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint
from tests.models.families import tiny

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"),
    pytest.mark.usefixtures("few_programs"),
]
COUNT, MOST = 5, 5
"""Tokens of an answer, and rows of a step."""
PARAMS = [
    SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, top_k=9
    ),
    SamplingParams(temperature=1.0, logprobs=2, logit_bias={3: 2.0}),
]


@pytest.fixture(scope="module", params=["qwen3", "window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    config = {
        "qwen3": tiny_qwen3(num_hidden_layers=1, head_dim=64, vocab_size=24, intermediate_size=32),
        "window": tiny(
            MistralConfig, num_hidden_layers=1, head_dim=64, sliding_window=12, vocab_size=24,
            hidden_size=48, intermediate_size=32, num_attention_heads=3, num_key_value_heads=1,
        ),
    }[request.param]  # fmt: skip
    folder = write_checkpoint(tmp_path_factory.mktemp("guesses"), config)
    return load_model(files_of(folder), dtype=torch.float32, device=DEVICE)


class World:
    """Two sequences in slots of a decode runner, whose earlier rows are random numbers."""

    def __init__(self, network: Network, ruled: int | None = None) -> None:
        """One of them (`ruled`) may say only what a rule allows."""
        self.case = Case(network, [])
        self.sampler = sampler = DeviceSampler(24, SLOTS, DEVICE)
        self.slots = slots = Slots(SLOTS, FEW, BLOCKS, sampler.token)
        program = FusedDecoder(network, self.case.cache, slots.given, pdl=False)
        checking = Checking(program, sampler, slots, BLOCK)
        self.runner: DecodeRunner[Sequence] = DecodeRunner(
            program, sampler, slots, BLOCK * BLOCKS, None, Event, checking
        )
        self.sequences = []
        for number, (length, params) in enumerate(zip((13, 29), PARAMS, strict=True)):
            rows = Rows.of([(7 * i + number) % 24 for i in range(length)])
            if number == ruled:
                params = replace(params, constraint=Constraint("regex", "."))
            sequence = Sequence(rows, Priority.PERSON, params)
            if number == ruled:
                rule: Any = Rule()
                guide = Guide(rule, lambda: ThinkTracker(None, None), (), None, (), frozenset())
                sequence.output = Output(tokenizer().stream(), ThinkTracker(None, None), (), guide=guide)
            sequence.seed = 5 + number
            sequence.table = BlockTable(list(self.case.tables[number]))
            self.sequences.append(sequence)
            logits = torch.zeros(24)
            logits[number] = 9.0
            self.runner.join(sequence, logits)
            self.take(self.runner.read())

    def take(self, drawn: list[tuple[Sequence, SampledToken]]) -> None:
        for sequence, token in drawn:
            sequence.generated.append(token.token_id)
            sequence.rows.append(token.token_id)

    def plain(self, sequences: list[Sequence]) -> list[SampledToken]:
        if self.runner.launch(sequences):
            for sequence in sequences:
                self.runner.guide(sequence, None)
            self.runner.draw()
        drawn = self.runner.read()
        self.take(drawn)
        return [token for _, token in drawn]

    def state(self) -> list[torch.Tensor]:
        """All that is on the device of two sequences; of the cache the rows that count."""
        found = [
            self.sampler.token[:2],
            self.sampler.step[:2],
            self.sampler.marks[:2],
            self.slots.given.counters[:2],
        ]
        for sequence in self.sequences:
            assert sequence.table is not None
            places = [
                sequence.table.blocks[row // BLOCK] * BLOCK + row % BLOCK
                for row in range(len(sequence.rows) - 1)
            ]
            found.append(self.case.cache.kv[:, :, places])
        return [tensor.clone() for tensor in found]


@dataclass
class Rule:
    """In place of a `Matcher`: what may follow depends on every token before."""

    state: int = 1

    def copy(self) -> "Rule":
        return Rule(self.state)

    def push(self, token: int) -> None:
        assert self.allows(token)
        self.state = mixed(self.state, token)

    def fill(self, words: Any) -> None:
        words[0] = sum(1 << token for token in range(24) if self.allows(token))

    def forced(self) -> list[int]:
        return []

    def allows(self, token: int) -> bool:
        return mixed(self.state, token) % 3 == 0 or token == self.state % 24


@each_value_once
@pytest.mark.parametrize("ruled", [None, 0, 1])
def test_right_and_wrong_guesses_leave_what_steps_of_one_row_leave(model: Network, ruled: int | None) -> None:
    one_by_one = World(model, ruled)
    first, second = one_by_one.sequences
    told = [one_by_one.plain([first, second]) for _ in range(COUNT)]
    texts = [list(sequence.generated) for sequence in (first, second)]
    state = one_by_one.state()
    world, random = World(model, ruled), Random(1)
    of = dict(zip(world.sequences, texts, strict=True))
    heard: dict[Sequence, list[SampledToken]] = {sequence: [] for sequence in world.sequences}
    while any(len(sequence.generated) <= COUNT for sequence in world.sequences):
        spans, rows = [], 0
        for sequence in world.sequences:
            coming = of[sequence][len(sequence.generated) :]
            most = min(len(coming) - 1, MOST - 2 - rows)
            if most < 0:
                continue
            guesses = coming[: random.randint(0, most)]
            if guesses and random.random() < 0.4:
                guesses[random.randrange(len(guesses))] = random.randrange(24)
            if sequence.guide is not None:
                guesses = guesses[: permitted(sequence, guesses, 1)]
            spans.append((sequence, tuple(guesses)))
            rows += 1 + len(guesses)
        for sequence, drawn in world.runner.check(spans, failed):
            world.take([(sequence, token) for token in drawn])
            heard[sequence] += drawn
    assert [sequence.generated for sequence in world.sequences] == texts
    for number, sequence in enumerate(world.sequences):
        assert heard[sequence] == [tokens[number] for tokens in told]
    for found, expected in zip(world.state(), state, strict=True):
        assert torch.equal(found, expected)
    # And a plain step goes on from there.
    assert world.plain(world.sequences) == one_by_one.plain([first, second])


def test_who_cannot_follow_his_constraint_leaves_alone(model: Network) -> None:
    world, one_by_one = World(model, 1), World(model, 1)
    first, second = world.sequences
    (expected,) = one_by_one.plain(one_by_one.sequences[:1])

    class Failing(Rule):
        def fill(self, words: Any) -> None:
            raise EngineError("too complex")

    assert second.guide is not None
    second.guide._matcher = Failing(1)  # type: ignore[assignment]
    second.guide.count = len(second.generated)
    found = world.runner.check([(first, ()), (second, ())], lambda one, error: world.runner.leave(one))
    assert found == [(first, [expected])]


def failed(sequence: Sequence, error: Exception) -> None:
    raise error


def test_each_row_has_the_table_of_its_sequence_and_draws_after_the_one_before() -> None:
    slots = torch.tensor([2, 2, 2, 0, -1, -1, -1, -1], dtype=torch.int32)
    places = torch.tensor([0, 1, 2, 0, 0, 0, 0, 0], dtype=torch.int32)
    guesses = torch.tensor([0, 11, 12, 0, 0, 0, 0, 0], dtype=torch.int32)
    token, counters = torch.tensor([5, 6, 7]), torch.tensor([[1, 4], [0, 0], [2 * PART * 4 + 3, 90]])
    stride = 2 * PART + 7
    tables = torch.arange(3 * stride, dtype=torch.int32).view(3, stride)
    to_active, to_token = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    to_counters, to_tables = (
        torch.zeros(8, 2, dtype=torch.int64),
        torch.full((8, stride), -7, dtype=torch.int32),
    )
    alone_counters, alone_tables = torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, 1, dtype=torch.int32)
    moves, to_moves = (torch.zeros(rows, 4, dtype=torch.int32) for rows in (3, 8))
    moves[2], moves[0] = torch.tensor([7, 9, 3, 1]), torch.tensor([-1, 8, 0, 1])
    spread_kernel[(8,)](
        *(slots, places, guesses, token, counters, tables, stride),
        *(to_active, to_token, to_counters, to_tables, alone_counters, alone_tables, moves, to_moves),
        BLOCK=4,
        PART=PART,
        ROWS=8,
    )
    assert to_moves[:4].tolist() == [[7, 9, 3, 3], [7, 9, 3, 0], [7, 9, 3, 0], [-1, 8, 0, 1]]
    assert to_active.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    assert to_token[:4].tolist() == [7, 11, 12, 5]
    last = 2 * PART * 4 + 3
    assert to_counters[:4].tolist() == [[last, 90], [last + 1, 91], [last + 2, 92], [1, 4]]
    for row, (slot, count) in enumerate([(2, 2 * PART + 1), (2, 2 * PART + 2), (2, 2 * PART + 2), (0, 1)]):
        assert torch.equal(to_tables[row, :count], tables[slot, :count])
        assert (to_tables[row, count:] == -7).all()
        assert int(alone_tables[row, 0]) == int(tables[slot, count - 1])
    assert alone_counters[:4].tolist() == [[3, 90], [0, 91], [1, 92], [1, 4]]

    chosen = torch.full((8, 8), 9, dtype=torch.int32)
    for place, drawn in ((0, [0, 0, 0]), (1, [3, 0, 11]), (2, [3, 0, 13])):
        follow_kernel[(1,)](slots, places, guesses, torch.tensor(drawn), chosen, place, ROWS=8)
    assert chosen[0].tolist() == [2, -1, -1, 0, -1, -1, -1, -1]
    assert chosen[1].tolist() == [-1, 2, -1, -1, -1, -1, -1, -1]
    assert chosen[2].tolist() == [-1] * 8, "what was drawn last is no guess"
