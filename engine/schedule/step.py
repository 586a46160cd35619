"""One turn of the loop: run the chunks that the scheduler chose, or one token of the lane, and say what came of it."""

import math
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from engine.cache.blocks import BlockManager, OutOfBlocksError
from engine.cache.kv_cache import KVCache
from engine.cache.sizing import is_out_of_memory
from engine.errors import EngineError
from engine.events import FinishReason
from engine.execute.cuda.decode_runner import Lane
from engine.execute.runner import Runner
from engine.sampling.sampler import SamplerState, sample
from engine.schedule.busy import Others
from engine.schedule.idle_pace import IdlePace
from engine.schedule.scheduler import Chunk, Scheduler, Step
from engine.schedule.sequence import Priority, Sequence


@dataclass(slots=True)
class Stepper:
    """Everything here belongs to the loop thread."""

    device: torch.device
    stop_ids: frozenset[int]
    context_length: int
    max_positions: int
    scheduler: Scheduler
    blocks: BlockManager
    cache: KVCache
    runner: Runner
    lane: Lane | None
    threads: int
    """Of torch on a CPU, for a person's request."""
    pace: IdlePace = field(default_factory=IdlePace)
    pace_alone: IdlePace = field(default_factory=IdlePace)
    """Of idle work that keeps to one core."""
    others: Others = field(default_factory=Others)
    alone: bool = False
    """Whether idle work keeps to one core now."""

    def step(self) -> None:
        """Run what the scheduler chose, or one token of the sequence in the lane."""
        if self.lane is not None and self.lane.sequence is not None:
            self._decode(self.lane, self.lane.sequence)
            self._report_finished()
            return
        step = Step()
        try:
            self._judge_host()
            self.alone = self.device.type == "cpu" and self.others.are_busy()
            self.scheduler.idle_chunk = self._idle_pace.rows
            step = self.scheduler.next_step()
            self._report_finished()
            if step.chunks:
                self._run(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may be left waiting
            ended = [chunk.sequence for chunk in step.chunks]
            for sequence in ended or [*self.scheduler.waiting, *self.scheduler.running]:
                self.scheduler.finish(sequence, None, error)
        self._report_finished()

    def _decode(self, lane: Lane, sequence: Sequence) -> None:
        """One token of the sequence in the lane: launch the step after it, then read it."""
        try:
            if sequence.cancelled:
                self.scheduler.finish(sequence, FinishReason.CANCELLED)
            else:
                ahead = self._can_go_on(sequence) and self._launch(lane, sequence)
                self._take(sequence, lane.read())
                if sequence.table is not None and ahead:
                    self.blocks.commit(sequence.table, sequence.rows.keys[-1:], (sequence.origin,))
                if sequence.finish_reason is None and ahead:
                    return
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may be left waiting
            self.scheduler.finish(sequence, None, error)
        lane.sequence = None

    def _can_go_on(self, sequence: Sequence) -> bool:
        """Whether another step may follow the token that is not read yet, and nobody else wants to run."""
        assert sequence.params is not None
        rows = sequence.rows
        others = [*self.scheduler.waiting, *self.scheduler.running]
        return (
            len(sequence.generated) + 1 != sequence.params.max_tokens
            and len(rows) + 1 < self.context_length
            and rows.next_position + 1 < self.max_positions
            and not any(s.priority is Priority.PERSON for s in others if s is not sequence)
        )

    def _launch(self, lane: Lane, sequence: Sequence) -> bool:
        """Launch the step of the token that is not read yet. False where there is no block for its row."""
        assert sequence.table is not None
        try:
            self.scheduler.reserve(sequence.table, 1, sequence.priority is Priority.IDLE)
        except OutOfBlocksError:
            return False
        lane.launch(len(sequence.rows), sequence.table.blocks)
        return True

    def _run(self, step: Step) -> None:
        idle = step.chunks[0].sequence.priority is Priority.IDLE
        self._share_cores(step.chunks, idle)
        began = perf_counter()
        logits = self._logits(step)
        self.scheduler.done(step)
        sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
        if self.lane is not None and len(sampling) == 1 and sampling[0].table is not None:
            sequence = sampling[0]
            rows = sequence.rows
            assert sequence.table is not None
            self.lane.begin(sequence, logits[0], len(rows), rows.next_position, sequence.table.blocks)
        else:
            for sequence, row in zip(sampling, logits, strict=True):
                self._take(sequence, self._sample(sequence, row))
        if idle and self.device.type == "cuda":
            # Otherwise chunk after chunk is queued, and a person waits for all of them.
            torch.cuda.synchronize(self.device)
        count = sum(chunk.count for chunk in step.chunks)
        pace = self._idle_pace if idle else self.pace
        # Rows that idle work decodes come one at a time: they say nothing of how many it should compute at once.
        pace.saw(count, perf_counter() - began, self.scheduler.max_chunk, idle and not sampling)

    @property
    def _idle_pace(self) -> IdlePace:
        return self.pace_alone if self.alone else self.pace

    def _logits(self, step: Step) -> list[torch.Tensor]:
        host = self.cache.host
        if host is None or self.device.type != "cuda":
            return self.runner.run(step.chunks)
        rows = sum(chunk.count for chunk in step.chunks)
        return host.costs.of_chunk(rows, lambda: self.runner.run(step.chunks))

    def _judge_host(self) -> None:
        """Have the host tier ready in time; do without it once computing a block is known to be about as fast."""
        host = self.cache.host
        if host is None:
            return
        if not host.costs.worth_it:
            self.cache.host = None
            self.blocks.tier.end()
            host.close()
        elif self.blocks.num_free < self.blocks.num_blocks // 2:
            host.prepare()

    def _share_cores(self, chunks: list[Chunk], idle: bool) -> None:
        """Torch gets the cores of a CPU for prompts only, and idle work one while other programs are busy.

        Beside the native kernels it only samples: its threads would go on spinning in the way of the next step.
        """
        if self.device.type != "cpu":
            return
        alone = idle and self.alone
        self.runner.set_alone(alone)
        wanted = self.threads if self.runner.uses_torch(chunks) and not alone else 1
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> int:
        """The next token; -1 where the logits are not numbers."""
        if self.lane is not None:
            return self.lane.sample(sequence, logits)
        assert sequence.params is not None
        if sequence.sampler is None:
            params = replace(sequence.params, seed=sequence.seed)
            sequence.sampler = SamplerState.create(
                params, sequence.rows.token_ids, logits.shape[-1], logits.device, sequence.generated
            )
        if not math.isfinite(logits.max()):
            return -1
        token_id = int(sample(logits, sequence.sampler))
        sequence.sampler.note(token_id)
        return token_id

    def _take(self, sequence: Sequence, token_id: int) -> None:
        """What a new token means for its sequence: text, events, whether it goes on."""
        params, output = sequence.params, sequence.output
        assert params is not None
        assert output is not None
        if token_id < 0:
            raise EngineError(
                "The model's output is not a number; its weights are damaged, or the dtype is too narrow for it: "
                "try --dtype float32."
            )
        sequence.last_token = perf_counter()
        sequence.first_token = sequence.first_token or sequence.last_token
        sequence.generated.append(token_id)
        sequence.rows.append(token_id)
        reason = None
        if token_id in self.stop_ids:
            event, reason = output.end(token_id), FinishReason.EOS
        else:
            event = output.push(token_id)
            if output.stopped:
                reason = FinishReason.STOP
            elif len(sequence.generated) == params.max_tokens:
                reason = FinishReason.LENGTH
            elif (
                len(sequence.rows) >= self.context_length or sequence.rows.next_position >= self.max_positions
            ):
                reason = FinishReason.CONTEXT_FULL
            if reason is not None:
                event = replace(event, text=event.text + output.flush())
        sequence.events.put(event)
        if reason is not None:
            self.scheduler.finish(sequence, reason)

    def _report_finished(self) -> None:
        failed = any(sequence.error is not None for sequence in self.scheduler.finished)
        for sequence in self.scheduler.finished:
            self._report(sequence)
        self.scheduler.finished.clear()
        # Not sooner: the frames of an error hold what was being computed.
        if failed and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _report(self, sequence: Sequence) -> None:
        sequence.error = sequence.error and explain(sequence.error)
        if sequence.output is not None:
            sequence.tail = sequence.output.flush()
        sequence.finished.set()
        sequence.events.put(None)

    def end(self, error: EngineError | None) -> None:
        """The loop ends, because of `error` if any: nobody may go on waiting."""
        # Nothing of the scheduler or the blocks is needed any more, and they may be what failed.
        scheduler = self.scheduler
        for sequence in [*scheduler.waiting, *scheduler.running, *scheduler.finished]:
            sequence.finish_reason = sequence.finish_reason or FinishReason.CANCELLED
            sequence.error = sequence.error or error
            self._report(sequence)


def explain(error: Exception) -> EngineError:
    """One line for people. The engine lives on: the step was not noted, its blocks are given back."""
    if is_out_of_memory(error):
        return EngineError(
            "Out of memory; the conversation is intact. Close other programs, or start with a smaller --context."
        )
    if isinstance(error, EngineError):
        return error
    text = (str(error).splitlines() or [""])[0] if isinstance(error, RuntimeError) else repr(error)
    return EngineError(f"The computation failed ({text[:200]}); the conversation is intact. Try again.")
