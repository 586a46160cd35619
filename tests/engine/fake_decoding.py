"""A model without a network and decode runners without a GPU, for tests of scheduling: quick, and exact to the bit.

Every row of `HashModel` depends on the row before, its token, its position and whether a decode step computed it, as
the bits of a GPU's kernels do; every logit depends on all rows of the table. So whoever reads a row that is not there,
or was written by somebody else, gets another text. With a window both depend on every row in it, and on no other.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.batch import Span, StepBatch
from engine.cache.block_table import BlockTable
from engine.cache.blocks import BlockManager
from engine.cache.copies import Copy, Offload, RowCopy
from engine.params import SamplingParams
from engine.sampling.sampler import SampledToken, SamplerState, log_chances, sample
from engine.schedule.guide import Guide
from engine.schedule.scheduler import PromptChunk
from engine.schedule.sequence import Sequence

MASK = 2**61 - 1


class Computes(Protocol):
    """What computes chunks: an engine's runner, or a HashModel."""

    def run(self, batch: StepBatch) -> list[Tensor]:
        """Logits [vocab] of each span that wants some."""
        ...


def mixed(*numbers: int) -> int:
    value = 0
    for number in numbers:
        value = ((value ^ (number + 0x9E3779B9)) * 0xBF58476D1CE4E5B9 + 12345) & MASK
        value ^= value >> 29
    return value


@dataclass
class HashModel:
    """Computes rows into `slots`, in place of an engine's runner."""

    vocab: int
    num_blocks: int
    block_size: int
    prompts: int = 0
    """The first so many tokens are of prompts, the others of answers: no prompt finds rows of an answer."""
    has_runner: bool = False
    host: dict[int, list[int]] = field(default_factory=dict)
    blocks: BlockManager | None = None
    """Where there is one, nobody may write to what somebody else holds, nor over rows that can be found."""
    window: int | None = None

    def __post_init__(self) -> None:
        self.slots = [0] * (self.num_blocks * self.block_size)
        self.computed = 0

    def carry_out(self, copy: Copy) -> None:
        size = self.block_size
        if isinstance(copy, RowCopy):
            rows = self.slots[copy.source * size : copy.source * size + copy.rows]
            self.slots[copy.target * size : copy.target * size + copy.rows] = rows
        elif isinstance(copy, Offload):
            self.host[copy.slots[0]] = self.slots[copy.block * size : (copy.block + 1) * size]
        else:
            self.slots[copy.block * size : (copy.block + 1) * size] = self.host[copy.slots[0]]

    def decode(self, batch: StepBatch) -> list[Tensor]:
        """What kernels of decode steps compute."""
        return self._run(batch, lambda span, row: True)

    def run(self, batch: StepBatch) -> list[Tensor]:
        """What a chunk computes; without a decode runner the rows of answers are computed as by a decode step."""
        return self._run(batch, lambda span, row: not self.has_runner and row >= span.answer)

    def _run(self, batch: StepBatch, decodes: Callable[[Span, int], bool]) -> list[Tensor]:
        found = []
        for span in batch.spans:
            rows = range(span.start, span.stop)
            for row, token, position in zip(rows, span.tokens, span.positions, strict=True):
                self._write(span.blocks, row, token, position, decodes(span, row))
            if span.wanted:
                last = span.stop - 1
                rows = range(0 if self.window is None else self._first_seen(last), span.stop)
                found.append(self.logits([self.slots[self._at(span.blocks, row)] for row in rows]))
        return found

    def logits(self, state: list[int]) -> Tensor:
        """One number of every row goes into them."""
        drawn = mixed(*state)
        logits = torch.arange(self.vocab, dtype=torch.float64)
        logits = ((logits + 1) * (drawn % 7919 + 1) % 997).float() / 100
        logits[: self.prompts] = -torch.inf
        return logits

    def alone(
        self, tokens: list[int], params: SamplingParams, seed: int, most: int, guide: Guide | None = None
    ) -> list[int]:
        """Up to `most` tokens that a prompt is answered with, without blocks and without anybody else."""
        sampler = SamplerState.create(replace(params, seed=seed), tokens, self.vocab, torch.device("cpu"))
        state: list[int] = []
        answer: list[int] = []
        for position, token in enumerate(tokens):
            state.append(mixed(*state[self._first_seen(position) :], token, position, 0))
        words = torch.zeros(-(-self.vocab // 32), dtype=torch.int32)
        while len(answer) < most:
            if guide is not None:
                guide.follow(answer)
                guide.fill(words.numpy())
            logits = self.logits(state[-self.window :] if self.window else state)
            answer.append(sample(logits, sampler, words if guide is not None else None))
            sampler.note(answer[-1])
            state.append(mixed(*state[self._first_seen(len(state)) :], answer[-1], len(state), 1))
        return answer

    def _first_seen(self, row: int) -> int:
        """The first row that goes into row `row`; without a window that is the one before, which stands for all."""
        return max(row + 1 - (self.window or 2), 0)

    def _at(self, blocks: Items[int], row: int) -> int:
        return blocks[row // self.block_size] * self.block_size + row % self.block_size

    def _write(self, blocks: Items[int], row: int, token: int, position: int, decoded: bool) -> None:
        if self.blocks is not None:
            block = self.blocks.every[blocks[row // self.block_size]]
            assert block.refs == 1, f"a row is written to block {block.id}, which has {block.refs} holders"
            assert len(block.keys) <= row % self.block_size, "a row is written over one that can be found"
        before = [self.slots[self._at(blocks, seen)] for seen in range(self._first_seen(row), row)]
        self.slots[self._at(blocks, row)] = mixed(*before, token, position, decoded)
        self.computed += 1


class FakeRunner:
    """A decode runner that computes at once what it enqueues, as a stream does it in that order, and tells later.

    `computes` is the engine's runner, or a HashModel.
    """

    def __init__(self, computes: Computes, capacity: int, most: int = 2, words: int = 0) -> None:
        """At most `most` steps are in flight; a mask has so many words."""
        self.words = words
        self.capacity = capacity
        self.slots: dict[Sequence, _Slot] = {}
        self.launches: list[int] = []
        """How many rows each step had."""
        self._computes = computes
        self._most = most
        self._unread: deque[list[tuple[Sequence, SampledToken]]] = deque()
        self._held: list[tuple[Sequence, Tensor]] = []
        """A step whose draws wait for masks."""
        self.held = 0
        """How many such steps there were."""
        self.checks_guesses = True
        self.firsts = 0
        self.accepted = 0
        self.guided = 0
        """Guesses of constrained sequences that were checked."""

    def join(self, sequence: Sequence, logits: Tensor | None) -> None:
        assert sequence not in self.slots, "it has a slot"
        assert len(self.slots) < self.capacity, "there is no free slot"
        assert sequence.pending == int(logits is None), "there are rows that were not computed"
        slot = _Slot(sequence)
        if sequence.guide is not None:
            slot.words = torch.zeros(self.words, dtype=torch.int32)
            sequence.allow(slot.words.numpy())
        self.slots[sequence] = slot
        if logits is not None:
            self._unread.append([(sequence, slot.draw(logits))])

    def launch(self, sequences: list[Sequence]) -> bool:
        assert sequences
        assert len(set(sequences)) == len(sequences) <= self.capacity
        assert sum(len(unit) > 0 for unit in self._unread) <= self._most + self.capacity
        spans = tuple(self.slots[sequence].step() for sequence in sequences)
        self.launches.append(len(spans))
        drawn = getattr(self._computes, "decode", self._computes.run)(StepBatch(spans))
        self._held = [(s, logits.clone()) for s, logits in zip(sequences, drawn, strict=True)]
        guided = any(s.guide is not None for s in sequences)
        if not guided:
            self.draw()
        self.held += guided
        return guided

    def check(
        self, spans: list[tuple[Sequence, tuple[int, ...]]], failed: Callable[[Sequence, Exception], None]
    ) -> list[tuple[Sequence, list[SampledToken]]]:
        """One row after the other, as long as guesses hold."""
        assert not any(self._unread)
        assert sum(1 + len(guesses) for _, guesses in spans) <= 8
        found = []
        for sequence, guesses in spans:
            slot, drawn = self.slots[sequence], list[SampledToken]()
            table = sequence.table
            assert table is not None
            words = [torch.zeros(self.words, dtype=torch.int32) for _ in (*guesses, None)]
            if slot.words is not None:
                sequence.allow_each([row.numpy() for row in words], guesses)
                self.guided += len(guesses)
            for guess, row in zip((*guesses, None), words, strict=True):
                slot.words = None if slot.words is None else row
                (logits,) = getattr(self._computes, "decode", self._computes.run)(StepBatch((slot.step(),)))
                drawn.append(slot.draw(logits))
                if drawn[-1].token_id != guess:
                    break
            self.accepted += len(drawn) - 1
            found.append((sequence, drawn))
        return found

    def guide(self, sequence: Sequence, drawn: int | None) -> None:
        words = self.slots[sequence].words
        if words is not None and (drawn is None or drawn >= 0):
            sequence.allow(words.numpy(), drawn)

    def draw(self) -> None:
        held, self._held = self._held, []
        self._unread.append([(s, self.slots[s].draw(logits)) for s, logits in held if s in self.slots])

    def read(self) -> list[tuple[Sequence, SampledToken]]:
        return self._unread.popleft()

    def leave(self, sequence: Sequence) -> None:
        del self.slots[sequence]


class _Slot:
    """What a device knows of a sequence: its rows, those whose tokens nobody has read included."""

    def __init__(self, sequence: Sequence) -> None:
        assert sequence.params is not None
        self.sequence = sequence
        self.rows = sequence.rows.copy()
        self.generated = list(sequence.generated)
        self.params = replace(sequence.params, seed=sequence.seed)
        self.sampler: SamplerState | None = None
        self.words: Tensor | None = None

    def draw(self, logits: Tensor) -> SampledToken:
        if self.sampler is None:
            self.sampler = SamplerState.create(
                self.params, self.rows.token_ids, logits.shape[-1], logits.device, self.generated
            )
        token = sample(logits, self.sampler, self.words)
        if token >= 0:
            self.sampler.note(token)
            self.rows.append(token)
        asked = self.params.logprobs
        return SampledToken(token) if asked is None else log_chances(logits, token, asked)

    def step(self) -> Span:
        """The row of the newest token."""
        table, row = self.sequence.table, len(self.rows) - 1
        assert table is not None
        shadow: Any = Sequence(self.rows, self.sequence.priority, self.params)
        shadow.generated = [*self.generated, 0]
        shadow.prompt_tokens = len(self.sequence.rows) - len(self.sequence.generated)
        shadow.table = BlockTable(list(table.blocks), row)
        return PromptChunk(shadow, row, 1).span
