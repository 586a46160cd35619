"""The decode lane: one sequence decodes on the device, and the host looks on one step behind.

    device   | step i: token i-1 -> token i | step i+1: token i -> token i+1 | ...
    host     | launch i+1, wait for token i | its text, its event; launch i+2 ...

Token, row, position, block table, sampling and its random numbers live in device memory, so the host never waits
for a token before it launches the next step. Where a token turns out to be the last, the one after is thrown away.
"""

from collections.abc import Sequence as Items
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.cache.rows import Rows
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.plain_program import PlainDecoder, StepInput
from engine.params import SamplingParams
from engine.sampling.device_sampler import HISTORY, DeviceSampler
from models.network import Network

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.schedule.sequence import Sequence

SMALLEST = 640
"""Rows of the first bucket. Each next one is twice as long; a prompt of a power of two has room to go on."""


class DecodeProgram(Protocol):
    """One token through the model, wholly on the device."""

    name: str

    def run(self, limit: int) -> Tensor:
        """Enqueue a step whose row is below `limit`; logits [vocab_size]."""
        ...


class Lane:
    """Holds the device's side of the one sequence that decodes in it. It belongs to the loop thread."""

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        attention: str,
        rows: int,
        graphs: Graphs | None,
        fused: bool,
    ) -> None:
        """`rows` is the most that a sequence holds; without `graphs` every step runs kernel by kernel.

        Raises ImportError where triton is not installed.
        """
        from engine.execute.cuda.fused_program import FusedDecoder, unsupported

        device = cache.kv.device
        capability = torch.cuda.get_device_capability(device)
        pdl = capability >= (9, 0)
        self.sequence: Sequence | None = None
        self.sampler = DeviceSampler(network.spec.vocab_size, device, pdl)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)
        self.rows = rows
        blocks = -(-rows // cache.block_size) + 1
        self.table = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(blocks, dtype=torch.int32, pin_memory=True)
        self._blocks: list[int] = []
        self._graphs = graphs
        self._events = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        self._launched = 0
        self._read = 0
        given = StepInput(self.sampler.token, self.counters, self.table)
        self.program: DecodeProgram
        if fused and unsupported(network) is None:
            self.program = FusedDecoder(network, cache, given, pdl)
        else:
            self.program = PlainDecoder(network, cache, given, attention)

    @property
    def name(self) -> str:
        """For people."""
        graphs = self._graphs is not None and self._graphs.problem is None
        return f"{self.program.name}, CUDA graph" if graphs else self.program.name

    @property
    def ahead(self) -> int:
        """Tokens that were launched and not read."""
        return self._launched - self._read

    def begin(
        self, sequence: "Sequence", logits: Tensor, row: int, position: int, blocks: Items[int]
    ) -> None:
        """Sample from logits [vocab], and be ready to launch the step of that token at `row` and `position`."""
        self.load(sequence)
        self.sampler.sample(logits)
        self.counters.copy_(torch.tensor([row, position]))
        self._blocks = []
        self.show(blocks)
        self.sequence = sequence
        self._note()

    def load(self, sequence: "Sequence") -> None:
        """Sample for `sequence` from now on."""
        assert sequence.params is not None
        prompt = sequence.rows.token_ids[: len(sequence.rows) - len(sequence.generated)]
        self.sampler.load(sequence.params, prompt, sequence.generated, sequence.seed)
        self._launched = self._read = len(sequence.generated)

    def sample(self, sequence: "Sequence", logits: Tensor) -> int:
        """The next token of a sequence that is not in the lane, from logits [vocab]; -1 for what is no number."""
        self.load(sequence)
        self.sampler.sample(logits)
        self._note()
        return self.read()

    def launch(self, row: int, blocks: Items[int]) -> None:
        """Enqueue the step of the newest token, which lies at `row` of a table of `blocks`."""
        self.show(blocks)
        self.step(row)
        self._note()

    def step(self, row: int) -> None:
        """Enqueue a step, nothing else."""
        limit = self._limit(row)
        if self._graphs is None:
            self._run(limit)
        else:
            self._graphs.run((limit, self.sampler.kind), lambda: self._run(limit))

    def read(self) -> int:
        """Wait for the oldest token that was not read; -1 where the logits were not numbers."""
        self._events[self._read % 2].synchronize()
        token = int(self.sampler.history[self._read % HISTORY])
        self._read += 1
        return token

    def show(self, blocks: Items[int]) -> None:
        """Bring the device's block table up to date: blocks come at the end, and the last full one may be replaced.

        No blocks at all: the next table is another one.
        """
        known = self._blocks
        if not blocks:
            self._blocks = []
            return
        first = max(len(known) - 2, 0)
        changed = [i for i in range(first, len(blocks)) if i >= len(known) or known[i] != blocks[i]]
        for index in changed:
            self._pinned[index] = blocks[index]
        if not known:
            self.table.copy_(self._pinned)
        else:
            for index in changed:
                self.table[index : index + 1].copy_(self._pinned[index : index + 1], non_blocking=True)
        if changed:
            self._blocks = list(blocks)

    def prepare(self) -> None:
        """Compile and record what conversations need, before the first: every bucket, greedy and with top-k."""
        self.table.zero_()
        for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=20)):
            self.sampler.load(params, [], [], 0)
            self.counters.zero_()
            self.sampler.sample(
                self.logits(0)
            )  # as after a prompt, which is another kernel than that of a step
            limit = SMALLEST
            while True:
                for _ in range(2 if self._graphs is not None else 1):
                    self.counters.zero_()
                    self.step(min(limit, self.rows) - 1)
                if limit >= self.rows:
                    break
                limit *= 2
        torch.cuda.synchronize(self.table.device)

    @torch.inference_mode()
    def logits(self, row: int) -> Tensor:
        """Logits [vocab_size] of the token that is in the buffers, at `row`; nothing is sampled."""
        return self.program.run(self._limit(row)).clone()

    @torch.inference_mode()
    def _run(self, limit: int) -> None:
        self.sampler.sample(self.program.run(limit), self.counters)

    def _limit(self, row: int) -> int:
        limit = SMALLEST
        while limit <= row:
            limit *= 2
        return limit

    def _note(self) -> None:
        self._events[self._launched % 2].record()
        self._launched += 1


def bare_rate(engine: "Engine", context: int, steps: int) -> float:
    """Seconds a token of the decode loop alone: `steps` greedy steps from row `context` on, read by nobody.

    For measurements; it empties the prefix cache. Raises EngineError where the engine has no lane.
    """
    return engine.on_lane(lambda lane: _bare_rate(lane, context, steps))


def _bare_rate(lane: Lane, context: int, steps: int) -> float:
    lane.sampler.load(SamplingParams(temperature=0.0), [], [], 0)
    lane.show([])
    lane.show(range(lane.table.shape[0] - 1))
    seconds = 0.0
    for measured in (False, True):  # the first round compiles and records
        lane.counters.fill_(context)
        torch.cuda.synchronize()
        began = perf_counter()
        for step in range(steps):
            lane.step(context + step)
        torch.cuda.synchronize()
        seconds = perf_counter() - began if measured else seconds
    lane.show([])
    return seconds / steps


def forced_logits(engine: "Engine", token_ids: list[int], start: int) -> Tensor:
    """Logits [len(token_ids) - start, vocab] after each of token_ids[start:], by decode steps one after the other.

    The tokens before `start` are prefilled. For measurements; the rows of the steps are forgotten. Raises
    EngineError where the engine has no lane.
    """
    engine.warm(token_ids[:start])

    def steps(lane: Lane) -> Tensor:
        def run(blocks: list[int]) -> Tensor:
            lane.show([])
            lane.show(blocks)
            logits = []
            for row in range(start, len(token_ids)):
                lane.sampler.token.fill_(token_ids[row])
                lane.counters.fill_(row)
                logits.append(lane.logits(row))
            return torch.stack(logits)

        return engine.with_rows(Rows.of(token_ids[:start]).keys, len(token_ids) - start, run)

    return engine.on_lane(steps, empty=False)
