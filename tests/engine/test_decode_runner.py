"""The decode runner's bookkeeping, with a model, a sampler and events that need no GPU."""

from collections import deque
from collections.abc import Sequence as Items
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cache.block_table import BlockTable
from engine.cache.rows import Rows
from engine.execute.cuda.decode_runner import ROWS, DecodeRunner, rows_for
from engine.execute.cuda.prefix_groups import KVShape, choose_sharing, share
from engine.execute.cuda.slots import Slots, StepInput
from engine.execute.cuda.tiles import FEW
from engine.params import Constraint, SamplingParams
from engine.sampling.device_sampler import DeviceSampler, DrawFeatures
from engine.sampling.sampler import SampledToken, allowed
from engine.schedule.guide import only
from engine.schedule.sequence import Priority, Sequence
from tests.fresh import seeds

CPU = torch.device("cpu")
VOCAB, BLOCK, BLOCKS = 97, 4, 30


def after(token: int, row: int, position: int, block: int, table: list[int]) -> int:
    """The next token of a model that looks at everything that a step has to get right."""
    before = sum(i * number for i, number in enumerate(table[: row // BLOCK]))
    return (token * 31 + row * 7 + position * 3 + block * 11 + before * 13 + 5) % VOCAB


class Program:
    """Implements `DecodeProgram`; `written` is its KV cache."""

    name = "a test"
    cuts = None

    def __init__(self, given: StepInput) -> None:
        self.given = given
        self.written: dict[int, int] = {}
        self.kv: KVShape | None = None
        self.shared_rows = 0
        self.sizes: set[tuple[int, int]] = set()

    def table(self, row: int, slot: int, own: int) -> list[int]:
        """What a row of the step reads: rows that it shares through the table of the first of its tile."""
        given = self.given
        table, newest = given.tables[0][slot].tolist(), int(given.counters[slot, 0])
        if not own:
            return table
        assert self.kv is not None
        shared = int(given.shared[row])
        assert shared % BLOCK == 0
        assert shared <= newest < shared + own
        if not shared:
            assert row not in given.members.tolist()
            return table
        self.shared_rows += shared
        sharing = choose_sharing(rows_for(int((given.active >= 0).sum())), self.kv.group)
        assert sharing is not None
        tiles = given.members[: sharing.tiles * sharing.members].view(sharing.tiles, sharing.members)
        (members,) = [tile for tile in tiles.tolist() if row in tile]
        assert all(int(given.shared[member]) == shared for member in members if member >= 0)
        leader = given.tables[0][int(given.active[members[0]])].tolist()
        return [*leader[: shared // BLOCK], *table[shared // BLOCK :]]

    def run(self, rows: int, limit: int, own: int = 0) -> Tensor:
        given, logits = self.given, torch.zeros(rows, VOCAB)
        self.sizes.add((rows, own))
        active = given.active[:rows].tolist()
        assert sorted(active, key=lambda slot: slot < 0) == active, "rows without a slot come last"
        for i, slot in enumerate(active):
            if slot < 0:
                continue
            token, (row, position) = int(given.token[slot]), given.counters[slot].tolist()
            assert row < limit
            table = self.table(i, slot, own)
            block = table[row // BLOCK]
            self.written[block * BLOCK + row % BLOCK] = token
            logits[i, after(token, row, position, block, table)] = 1.0
        return logits


class Sampler:
    """The part of `DeviceSampler` that the runner uses: always the likeliest token."""

    vocab_size = VOCAB

    def __init__(self, slots: int) -> None:
        self.token = torch.full((slots,), -1, dtype=torch.int64)
        self.history = torch.full((slots, 64), -1, dtype=torch.int32)
        self.step = torch.zeros(slots, dtype=torch.int64)
        self.masks = torch.zeros(slots, -(-VOCAB // 32), dtype=torch.int32)
        self.guided = [False] * slots

    def words(self, slot: int) -> Any:
        return self.masks[slot].numpy()

    def load(
        self, slot: int, params: SamplingParams, prompt: list[int], generated: list[int], seed: int
    ) -> None:
        self.step[slot] = len(generated)
        self.guided[slot] = params.constraint is not None

    def draw(self, slots: list[int]) -> DrawFeatures:
        return DrawFeatures()

    def drawn(self, tokens: Items[tuple[int, int, int | None]]) -> list[SampledToken]:
        return [SampledToken(int(self.history[slot, number % 64])) for slot, number, _ in tokens]

    def sample(self, logits: Tensor, active: Tensor, counters: Tensor | None, draw: DrawFeatures) -> None:
        for row, slot in enumerate(active.tolist()):
            if slot >= 0:
                may = allowed(self.masks[slot], VOCAB) if self.guided[slot] else torch.ones(VOCAB).bool()
                self.token[slot] = logits[row].masked_fill(~may, -torch.inf).argmax()
                self.history[slot, self.step[slot] % 64] = self.token[slot]
                self.step[slot] += 1
                if counters is not None:
                    counters[slot] += 1


class Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def a_runner(slots: int) -> DecodeRunner:
    sampler = Sampler(slots)
    held = Slots(slots, rows_for(slots), BLOCKS, sampler.token)
    return DecodeRunner(Program(held.given), sampler, held, BLOCK * BLOCKS, None, Event)  # type: ignore[arg-type]


class Stream:
    """A sequence with blocks of its own, and the tokens that it must get."""

    def __init__(self, number: int, length: int, offset: int = 0, common: Items[int] = ()) -> None:
        """`common`: its first blocks, which others have as well."""
        rows = Rows.of([(number * 13 + i) % VOCAB for i in range(length)])
        rows.next_position += offset
        self.sequence = Sequence(rows, Priority.PERSON, SamplingParams(temperature=0.0))
        self.sequence.table = BlockTable([])
        self.blocks = [*common, *(number * BLOCKS + i for i in range(len(common), BLOCKS))]
        self.first = (number * 17) % VOCAB
        self.launched = 0
        self.read: list[int] = []

    def logits(self) -> Tensor:
        """After all rows that it has, whose tokens are read."""
        token = (
            self.first if not self.sequence.generated else self.expected(len(self.sequence.generated) + 1)[-1]
        )
        return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()

    def expected(self, count: int) -> list[int]:
        prompt = len(self.sequence.rows) - len(self.sequence.generated)
        gap = self.sequence.rows.next_position - len(self.sequence.rows)
        tokens = [self.first]
        while len(tokens) < count:
            row = prompt + len(tokens) - 1
            tokens.append(after(tokens[-1], row, row + gap, self.blocks[row // BLOCK], self.blocks))
        return tokens

    def make_room(self, unread: int) -> None:
        row = len(self.sequence.rows) + unread - 1
        assert self.sequence.table is not None
        self.sequence.table.blocks[:] = self.blocks[: row // BLOCK + 1]

    def take(self, token: int) -> None:
        self.sequence.generated.append(token)
        self.sequence.rows.append(token)


@pytest.mark.parametrize("seed", seeds(4))
def test_sequences_that_join_and_leave_at_random_get_the_tokens_that_they_get_alone(seed: int) -> None:
    random = Random(seed)
    slots = random.choice([1, 3, 8, 20])
    runner = a_runner(slots)
    streams = [Stream(i, random.randint(1, 20), random.randint(0, 3)) for i in range(12)]
    drive(runner, streams, random, slots)


@pytest.mark.parametrize("seed", seeds(4))
def test_sequences_that_share_prefixes_get_the_tokens_that_they_get_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.execute.cuda.prefix_groups.LEAST", 2 * BLOCK)
    monkeypatch.setattr("engine.execute.cuda.prefix_groups.WORTH", 0)
    random = Random(seed)
    runner = a_runner(16)
    program = runner.program
    assert isinstance(program, Program)
    program.kv = KVShape(4, BLOCK, 1)
    prefixes = [(900, 901, 902, 903), (900, 901, 902), (910, 911), ()]
    streams = [
        Stream(i, random.randint(4 * BLOCK, 6 * BLOCK), common=prefixes[min(random.randint(0, 5), 3)])
        for i in range(16)
    ]
    drive(runner, streams, random, 16, joining=1.0)
    assert program.shared_rows > 0


def test_who_shares_is_decided_only_when_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execute.cuda.prefix_groups.LEAST", 2 * BLOCK)
    monkeypatch.setattr("engine.execute.cuda.prefix_groups.WORTH", 0)
    decisions: list[int] = []

    def counted(tables: list[list[int]], *others: Any) -> tuple[list[int], list[list[int]]]:
        decisions.append(len(tables))
        return share(tables, *others)

    monkeypatch.setattr("engine.execute.cuda.decode_runner.share", counted)
    runner = a_runner(16)
    program = runner.program
    assert isinstance(program, Program)
    program.kv = KVShape(1, BLOCK, 1)
    streams = [Stream(i, 3 * BLOCK + 1, common=(900, 901)) for i in range(10)]

    def step(there: list[Stream]) -> bool:
        before = program.shared_rows
        for stream in there:
            stream.make_room(stream.launched + 1)
            stream.launched += 1
        runner.launch([stream.sequence for stream in there])
        return program.shared_rows > before

    for stream in streams:
        runner.join(stream.sequence, stream.logits())
    assert all(step(streams) for _ in range(3))
    assert not step(streams[:FEW])
    assert step(streams[:9])
    runner.leave(streams[9].sequence)
    assert step(streams[:9])
    assert decisions == [10, 9]
    runner.leave(streams[0].sequence)
    streams[0].launched = 0
    runner.join(streams[0].sequence, streams[0].logits())
    assert step(streams[:9])
    assert decisions == [10, 9, 9]


def drive(
    runner: DecodeRunner, streams: list[Stream], random: Random, slots: int, joining: float = 0.5
) -> None:
    """Join, launch, read and leave at random: every stream gets its tokens."""
    unread: dict[Sequence, int] = {}
    flights: deque[set[Sequence]] = deque()
    of = {stream.sequence: stream for stream in streams}

    def read() -> None:
        wanted = flights.popleft()
        for sequence, token in runner.read():
            assert sequence in wanted
            wanted.remove(sequence)
            unread[sequence] -= 1
            of[sequence].take(token.token_id)
        assert not wanted

    for _ in range(60):
        away = [
            stream for stream in streams if stream.sequence not in unread and len(stream.sequence.rows) < 90
        ]
        if away and len(unread) < slots and random.random() < joining:
            stream = random.choice(away)
            runner.join(stream.sequence, stream.logits())
            unread[stream.sequence] = 1
            flights.append({stream.sequence})
        if unread and random.random() < 0.2:
            sequence = random.choice(list(unread))
            del unread[sequence]  # what is in flight for it is lost, and computed again when it comes back
            for wanted in flights:
                wanted.discard(sequence)
            runner.leave(sequence)
        ready = [s for s in unread if unread[s] <= 1 and random.random() < 0.9]
        if ready:
            for sequence in ready:
                of[sequence].make_room(unread[sequence])
                unread[sequence] += 1
            runner.launch(ready)
            flights.append(set(ready))
        while len(flights) > 1:
            read()
    while flights:
        read()
    assert sum(len(stream.sequence.generated) for stream in streams) > 25
    program = runner.program
    assert isinstance(program, Program)
    for stream in streams:
        count = len(stream.sequence.generated)
        assert stream.sequence.generated == stream.expected(max(count, 1))[:count]
    # A row without a slot, or of one that has left, writes nowhere else.
    for place, token in program.written.items():
        stream, row = streams[place // (BLOCK * BLOCKS)], place % (BLOCK * BLOCKS)
        number = row - (len(stream.sequence.rows) - len(stream.sequence.generated))
        assert token == stream.expected(number + 1)[number]


def test_a_slot_is_free_again_at_once_and_nothing_of_its_former_sequence_is_read() -> None:
    runner = a_runner(1)
    one, two = Stream(0, 5), Stream(1, 6)
    runner.join(one.sequence, one.logits())
    one.make_room(1)
    runner.launch([one.sequence])
    runner.leave(one.sequence)
    runner.join(two.sequence, two.logits())
    two.make_room(1)
    runner.launch([two.sequence])
    assert [runner.read() for _ in range(4)] == [
        [],
        [],
        [(two.sequence, SampledToken(two.first))],
        [(two.sequence, SampledToken(two.expected(2)[1]))],
    ]


class Chain:
    """In place of a Guide: after token t only 3 t + 1 may follow."""

    last = 0

    def follow(self, tokens: list[int]) -> None:
        self.last = tokens[-1] if tokens else 0

    def push(self, token: int) -> None:
        self.last = token

    def fill(self, words: Any) -> None:
        only(words, (3 * self.last + 1) % VOCAB)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_constrained_sequence_draws_what_follows_its_last_token_and_holds_up_nobody(kernels: bool) -> None:
    runner, free, bound = a_runner(2), Stream(0, 5), Stream(1, 6)
    if kernels:
        pytest.importorskip("triton")
        sampler = DeviceSampler(VOCAB, 2, CPU)
        held = Slots(2, rows_for(2), BLOCKS, sampler.token)
        runner = DecodeRunner(Program(held.given), sampler, held, BLOCK * BLOCKS, None, Event)
    bound.sequence.params = SamplingParams(temperature=0.0, constraint=Constraint("json_object"))
    bound.sequence.output = SimpleNamespace(guide=Chain())  # type: ignore[assignment]
    streams, found = {s.sequence: s for s in (free, bound)}, {s.sequence: [] for s in (free, bound)}
    for stream in (free, bound):
        runner.join(stream.sequence, stream.logits())
    waiting = 2
    for _ in range(8):
        for stream in (free, bound):
            stream.make_room(1)
        assert runner.launch(list(streams)), "the draws have to wait"
        computed = len(runner.program.written)  # type: ignore[attr-defined]
        assert computed, "and the logits do not"
        for sequence, drawn in [each for _ in range(waiting) for each in runner.read()]:
            runner.guide(sequence, drawn.token_id)
            found[sequence].append(drawn.token_id)
            sequence.generated.append(drawn.token_id)
            sequence.rows.append(drawn.token_id)
        runner.draw()
        waiting = 1
    chain = [1]
    while len(chain) < 8:
        chain.append((3 * chain[-1] + 1) % VOCAB)
    assert found[bound.sequence] == chain
    assert found[free.sequence] == free.expected(8)
    runner.read()
    runner.leave(bound.sequence)
    free.make_room(1)
    assert not runner.launch([free.sequence]), "a step without a constraint is what it always was"


def test_only_what_has_changed_is_sent() -> None:
    slots = Slots(4, 4, BLOCKS, torch.zeros(4, dtype=torch.int64))
    slots.put(2, 9, 10)
    slots.show(2, [5, 6, 7])
    slots.activate([2, 0], 2)
    slots.send()
    assert slots.given.counters[2].tolist() == [9, 10]
    assert slots.given.tables[0][2, :4].tolist() == [5, 6, 7, 0]
    assert slots.given.active.tolist() == [2, 0, -1, -1]
    slots.given.tables[0].fill_(99)
    slots.show(2, [5, 8, 7, 9])  # a full block was replaced by one that was there before
    slots.activate([2, 0, 1], 4)
    slots.send()
    assert slots.given.tables[0][2, :5].tolist() == [99, 8, 99, 9, 99]
    assert slots.given.active.tolist() == [2, 0, 1, -1]
    slots.show(2, [99, 99, 7, 9, 3], 2)  # the window has gone past two blocks
    slots.send()
    slots.given.tables[0][2].fill_(0)
    slots.show(2, [99, 99, 99, 9, 3, 4], 3)
    slots.send()
    assert slots.given.tables[0][2, :7].tolist() == [0, 0, 99, 0, 0, 4, 0]
    slots.put(2, 0, 0)  # another sequence
    slots.show(2, [5])
    slots.send()
    assert slots.given.tables[0][2, 0] == 5


def test_every_number_of_sequences_has_rows() -> None:
    assert [rows_for(count) for count in (1, 2, 3, 5, 8, 9, 17, 256)] == [1, 2, 4, 8, 8, 16, 32, 256]
    assert list(ROWS) == sorted(set(ROWS))


def test_a_runner_prepares_without_writing_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execute.cuda.decode_runner.LEAST", 2 * BLOCK)
    runner = a_runner(32)
    program = runner.program
    assert isinstance(program, Program)
    program.kv = KVShape(2, BLOCK, 1)
    runner.prepare(20)
    assert not program.written
    assert {rows for rows, own in program.sizes if not own} == {1, 2, 4, 8, 16, 32}
    assert {rows for rows, own in program.sizes if own} == {16, 32}
