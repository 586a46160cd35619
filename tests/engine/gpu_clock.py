"""The engine's step on a GPU that is not there: what is enqueued takes what a machine says, and no time passes."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.batch import Recorded, StepBatch
from engine.cache.blocks import BlockManager
from engine.cache.rows import Rows
from engine.params import SamplingParams
from engine.sampling.sampler import SampledToken
from engine.schedule.answers import Answers
from engine.schedule.chunk_pace import RowCost
from engine.schedule.computing import Computing
from engine.schedule.output import Output
from engine.schedule.reasoning import ThinkTracker
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Priority, Sequence
from engine.schedule.step import EngineStep
from tests.engine.tiny import tiny_tokenizer

SIZE, TOKEN = 256, 5
"""Rows of a block; the token that everybody gets."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a GPU."""

    decode: float = 0.0015
    fixed: float = 0.003
    """Of a chunk, however small."""
    row: float = 1e-5
    """Of a row with nothing before it, more."""
    even: float = 10_000.0
    """Rows of context whose attention takes as long."""
    launching: float = 0.012
    """What the host takes to enqueue a chunk of more than `recorded` rows, or of several prompts."""
    recorded: Recorded = field(default_factory=Recorded)
    """Chunks of these sizes are enqueued at once."""

    def chunk(self, batch: StepBatch) -> tuple[float, float]:
        """Of the host, and of the device at least."""
        rows, prompts = sum(span.count for span in batch.spans), len(batch.spans)
        before = sum(span.count * (span.start + span.count / 2) for span in batch.spans)
        sizes = self.recorded.alone if prompts == 1 else self.recorded.together
        launching = 0.0002 if sizes and (prompts > 1 or rows <= sizes[-1]) else self.launching
        computed = self.recorded.computed(prompts, rows)
        return launching, self.fixed + self.row * (computed + before / self.even)


class Clock:
    """Of the host, and when the device will have done what was enqueued."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def enqueue(self, host: float, device: float) -> None:
        """Work that takes the host so long to enqueue, piece by piece, and the device so long at least."""
        begin = max(self.host, self.device)
        self.host += host
        self.device = max(begin + device, self.host)

    def event(self) -> type[Any]:
        """In place of torch.cuda.Event."""
        clock = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(clock.host, clock.device)

            def query(self) -> bool:
                return self.at <= clock.host

            def elapsed_time(self, end: "Event") -> float:
                return 1e3 * (end.at - self.at)

        return Event


@dataclass
class ClockRunner:
    """A decode runner that draws TOKEN for everybody, and notes when somebody gets it."""

    clock: Clock
    machine: Machine
    capacity: int = 64
    checks_guesses: ClassVar[bool] = False
    told: dict[Sequence, list[float]] = field(default_factory=dict)
    _unread: deque[tuple[float, list[Sequence]]] = field(default_factory=deque)

    def join(self, sequence: Sequence, logits: Tensor | None) -> None:
        if logits is not None:
            self.clock.enqueue(0.0001, 0.00005)
            self._unread.append((self.clock.device, [sequence]))

    def launch(self, sequences: list[Sequence]) -> bool:
        self.clock.enqueue(0.0002, self.machine.decode)
        self._unread.append((self.clock.device, sequences))
        return False  # no draw waits

    def read(self) -> list[tuple[Sequence, SampledToken]]:
        done, sequences = self._unread.popleft()
        self.clock.host = max(self.clock.host, done) + 1e-5 * len(sequences)
        for sequence in sequences:
            self.told.setdefault(sequence, []).append(self.clock.host)
        return [(sequence, SampledToken(TOKEN)) for sequence in sequences]

    def leave(self, sequence: Sequence) -> None:
        pass


class Served:
    """An engine's step on `machine`; the caller replaces torch.cuda.Event by `clock.event()` before."""

    def __init__(self, machine: Machine, row_cost: RowCost, max_chunk: int = 8192) -> None:
        self.clock, self.machine = Clock(), machine
        blocks = BlockManager(1024, SIZE, lambda copy: None)
        self.scheduler = Scheduler(blocks, max_chunk, 8, row_cost=row_cost, recorded=machine.recorded)
        self.runner = ClockRunner(self.clock, machine)
        computes: Any = SimpleNamespace(run=self._run, firsts=0, uses_torch=lambda _: True)
        cache: Any = SimpleNamespace(host=None)
        self.chunks: list[tuple[int, float]] = []
        """Rows of each chunk, and what it took."""
        self.step = EngineStep(
            self.scheduler,
            Computing(torch.device("cuda"), self.scheduler, cache, computes, 1),
            Answers(self.scheduler, frozenset()),
        )
        decode: Any = self.runner
        self.step.decode_with(decode)
        self._made: list[Sequence] = []

    def _run(self, batch: StepBatch) -> list[Tensor]:
        before = max(self.clock.device, self.clock.host)
        self.clock.enqueue(*self.machine.chunk(batch))
        self.chunks.append((sum(span.count for span in batch.spans), self.clock.device - before))
        return [torch.zeros(8) for span in batch.spans if span.wanted]

    def arrive(self, rows: int, answer: int) -> Sequence:
        """A prompt like no other."""
        params = SamplingParams(max_tokens=answer)
        output = Output(tiny_tokenizer().stream(), ThinkTracker(None, None), ())
        prompt = [1 + len(self._made), *[1] * (rows - 1)]
        self._made.append(Sequence(Rows.of(prompt), Priority.PERSON, params, output))
        self.scheduler.add(self._made[-1])
        return self._made[-1]

    def run(self, until: Callable[[], bool]) -> None:
        """Step after step."""
        while not until():
            self.step.step()
            self.clock.host += 1e-4  # scheduling
            assert not any(sequence.error for sequence in self._made), "a step failed"

    def gaps(self, sequences: list[Sequence], begin: float, end: float) -> list[float]:
        """Seconds between tokens told in that time."""
        found = []
        for sequence in sequences:
            times = [t for t in self.runner.told.get(sequence, []) if begin <= t <= end]
            found += [after - before for before, after in pairwise(times)]
        return found
