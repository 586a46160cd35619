"""Computes the chunks of a step, and learns from their times how many rows to compute at once, on how many cores."""

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch

from engine.batch import StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.runner import Runner
from engine.kernels.recording import wait_for
from engine.schedule.chunk_pace import ChunkPace, ChunkTimer
from engine.schedule.cpu_load import OtherPrograms
from engine.schedule.idle_pace import IdlePace
from engine.schedule.scheduler import PromptChunk, Scheduler, Step
from engine.schedule.sequence import Priority
from engine.store.disk import DiskTier


@dataclass(slots=True)
class Computing:
    """Computes chunks at a pace that delays nobody. Only the loop thread may use it."""

    device: torch.device
    scheduler: Scheduler
    cache: KVCache
    runner: Runner
    threads: int
    """Torch threads for a person's request on a CPU."""
    pace: IdlePace = field(default_factory=IdlePace)
    pace_alone: IdlePace = field(default_factory=IdlePace)
    """The pace of idle work that is restricted to one core."""
    chunk_pace: ChunkPace = field(default_factory=ChunkPace)
    others: OtherPrograms = field(default_factory=OtherPrograms)
    timer: ChunkTimer | None = None
    """Set on a GPU only."""
    seconds: float = 0.0
    """The seconds of this step's batch, if it only decodes and runs on a CPU; otherwise 0."""
    _decode_s: float = 0.0
    """The seconds of the last batch on a CPU that had neither a prompt nor guesses."""
    _alone: bool = False
    """Whether idle work is currently restricted to one core."""
    _torch_threads: int = 0
    """The number of torch threads set last; 0 before the first time."""

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.timer = ChunkTimer()

    def begin(self) -> None:
        """Tell the scheduler how many rows the chunks of the next step may have."""
        self._judge_host()
        self._alone = self.device.type == "cpu" and self.others.are_busy()
        if self.timer is not None:
            self.timer.read()
        self.seconds = 0.0
        pace = self.chunk_pace
        self.scheduler.idle_chunk = self._idle_pace.rows
        self.scheduler.beside_chunk = pace.rows, pace.cost

    def leave_cores(self) -> None:
        """Restrict idle work on a CPU to one core while other programs are busy."""
        if self.device.type == "cpu":
            self._alone = self.others.are_busy()
            self.runner.leave_cores(self._alone, self.others.free)

    def run(
        self, chunks: list[PromptChunk], disk: DiskTier | None
    ) -> list[tuple[PromptChunk, list[torch.Tensor]]]:
        """Compute chunks. Return those whose next token is drawn now, each with logits [vocab] of its row and of the
        rows of its guesses. `disk` learns how long computing takes."""
        idle = chunks[0].sequence.priority is Priority.IDLE
        prompts = Step(chunks=chunks).prompts
        count = sum(chunk.count for chunk in chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        batch = StepBatch(tuple(chunk.span for chunk in chunks))
        self._share_cores(batch, idle)
        began = perf_counter()
        logits = self._logits(prompts, batch, disk)
        self.scheduler.done(Step(chunks=chunks))
        if idle:  # otherwise chunks queue up on a GPU, and a person's request waits for all of them
            wait_for(self.device)
        seconds = perf_counter() - began
        pace = self._idle_pace if idle else self.pace
        # Idle work decodes one row at a time: that says nothing about how many rows it should compute at once.
        pace.saw(count, seconds, self.scheduler.max_chunk, idle and not sampling)
        if self.device.type == "cpu" and not idle:
            if not prompts:
                self.seconds = seconds
                if not any(chunk.guesses for chunk in chunks):
                    self._decode_s = seconds
            else:
                decoding = self._decode_s if len(prompts) < len(chunks) else 0.0
                self._saw(prompts, disk, seconds - decoding)
        each = iter(logits)
        found = [(chunk, [next(each) for _ in range(1 + len(chunk.guesses))]) for chunk in sampling]
        if self.scheduler.blocks.marks is not None:
            for chunk, rows in found:
                if len(chunk.sequence.rows) == chunk.sequence.prompt_tokens:
                    self.scheduler.logits.note(chunk.sequence.rows.keys, rows[0])
        return found

    @property
    def _idle_pace(self) -> IdlePace:
        return self.pace_alone if self._alone else self.pace

    def _logits(
        self, prompts: list[PromptChunk], batch: StepBatch, disk: DiskTier | None
    ) -> list[torch.Tensor]:
        if self.timer is None:
            return self.runner.run(batch)
        firsts = self.runner.firsts
        logits = self.timer.of(partial(self._saw, prompts, disk), lambda: self.runner.run(batch))
        if self.runner.firsts != firsts:
            self.timer.forget()
        return logits

    def _saw(self, prompts: list[PromptChunk], disk: DiskTier | None, seconds: float) -> None:
        """Record the seconds that a batch of these prompt chunks took."""
        scheduler, rows = self.scheduler, sum(chunk.count for chunk in prompts)
        computed = scheduler.recorded.computed(len(prompts), rows)
        cost = sum(scheduler.row_cost.cost(chunk.start, chunk.count) for chunk in prompts)
        self.chunk_pace.saw(computed, cost + computed - rows, seconds)
        if self.cache.host is not None and self.timer is not None:
            self.cache.host.costs.saw(rows, seconds)
        if disk is not None:
            disk.costs.saw(rows, seconds)

    def _judge_host(self) -> None:
        """Prepare the host tier in time; drop it once computing a block is known to be about as fast."""
        host, blocks = self.cache.host, self.scheduler.blocks
        if host is None:
            return
        if not host.costs.worth_it:
            self.cache.host = None
            blocks.tier.end()
            host.tell(None)
            host.close()
        elif blocks.is_filling:
            host.prepare()

    def _share_cores(self, batch: StepBatch, idle: bool) -> None:
        """Give torch all CPU threads for prompts only, and leave cores to other programs: idle work all but one.

        With the native kernels torch only samples: its threads would keep spinning and slow down the next step.
        """
        # All ranks have as many threads: the same bits.
        if self.device.type != "cpu" or self.runner.is_divided:
            return
        alone = idle and self._alone
        self.runner.leave_cores(alone, self.others.free)
        wanted = self.threads if self.runner.uses_torch(batch) and not alone else 1
        if self._torch_threads != wanted:
            self._torch_threads = wanted
            torch.set_num_threads(wanted)
