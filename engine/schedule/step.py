"""A step of the engine: compute what the scheduler chose, and report the results."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import torch

from engine.batch import StepBatch
from engine.cache.blocks import BlockManager
from engine.cache.kv_cache import KVCache
from engine.errors import EngineError, GpuLostError
from engine.events import FinishReason
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.faults import explain
from engine.execute.runner import Runner
from engine.kernels.recording import wait_for
from engine.sampling.sampler import SampledToken, SamplerState, log_chances, sample
from engine.schedule.chunk_pace import ChunkPace, ChunkTimer
from engine.schedule.cpu_load import OtherPrograms
from engine.schedule.decoding import Decoding
from engine.schedule.ending import Ending
from engine.schedule.forced_tokens import FEWEST_FORCED, MOST_FORCED
from engine.schedule.idle_pace import IdlePace
from engine.schedule.scheduler import PromptChunk, Scheduler, Step
from engine.schedule.sequence import Priority, Sequence, SequenceStatus
from engine.schedule.speculating import Speculating
from engine.speculation.cost_model import MOST_ROWS
from engine.store.disk import DiskTier


@dataclass(slots=True)
class EngineStep:
    """Runs steps. Only the loop thread may use it."""

    device: torch.device
    stop_ids: frozenset[int]
    scheduler: Scheduler
    blocks: BlockManager
    cache: KVCache
    runner: Runner
    threads: int
    """Torch threads for a person's request on a CPU."""
    decoding: Decoding | None = None
    """None: sequences decode in the same batch as prompt chunks, and the host samples."""
    pace: IdlePace = field(default_factory=IdlePace)
    pace_alone: IdlePace = field(default_factory=IdlePace)
    """The pace of idle work that is restricted to one core."""
    chunk_pace: ChunkPace = field(default_factory=ChunkPace)
    timer: ChunkTimer | None = None
    """Set on a GPU only."""
    decode_s: float = 0.0
    """The seconds of the last batch on a CPU that had neither a prompt nor guesses."""
    seconds: float = 0.0
    """The seconds of this step's batch, if it only decodes and runs on a CPU; otherwise 0."""
    others: OtherPrograms = field(default_factory=OtherPrograms)
    ending: Ending = field(init=False)
    alone: bool = False
    """Whether idle work is currently restricted to one core."""
    torch_threads: int = 0
    """The number of torch threads set last; 0 before the first time."""
    jumps: bool = True
    """Whether rows of an answer in a slot may be computed like those of a prompt."""
    speculating: Speculating | None = None
    """None: speculation is off."""
    disk: DiskTier | None = None
    watch: Callable[[], None] = lambda: None
    """Called after a token is sampled. Raises EngineError if other ranks are lost, because it is meaningless then."""
    _launched_at: float = 0.0
    """When the host finished the last step of a decode runner; 0.0 if that says nothing about the next step."""
    _firsts: int = 0
    _checked: tuple[list[tuple[Sequence, int, int]], float] | None = None
    """The results of the guesses checked in the last step, and when that step began."""
    _waiting: float = 0.0
    """Since when the device has been idle because the step waited for guesses; 0.0: it has work."""
    _guided: dict[Sequence, None] = field(default_factory=dict)
    """Constrained sequences in slots whose tokens were just read, in reading order."""

    def __post_init__(self) -> None:
        self.ending = Ending(self.scheduler)
        if self.device.type == "cuda":
            self.timer = ChunkTimer()

    def decode_with(self, runner: DecodeRunner[Sequence]) -> None:
        """Decode in slots of `runner` from now on. No sequence may be running."""
        self.decoding = Decoding(runner, self.blocks)
        self.scheduler.slots, self.scheduler.leave = runner.capacity, self.decoding.leave
        if not runner.checks_guesses:
            self.speculating = None

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs, or a step is in flight whose tokens are unread, wanted or not."""
        return self.scheduler.has_work or (self.decoding is not None and bool(self.decoding.in_flight))

    @property
    def is_busy(self) -> bool:
        """Whether there is work, or a request waits for the disk."""
        return self.has_work or (self.disk is not None and self.disk.is_reading)

    def while_idle(self) -> bool:
        """Spend some milliseconds on making later steps faster, unless a request waits for the disk: it would delay
        each group of blocks. Return whether more is left."""
        if self.is_busy:
            return False
        more = self.disk is not None and self.disk.go_on()
        if self.device.type == "cpu":
            self.alone = self.others.are_busy()
            self.runner.set_alone(self.alone)
        if self.speculating is not None and self.ending.idle(self.speculating.while_idle):
            return True
        if self.device.type == "cpu":
            return self.runner.while_idle() or more
        return (self.decoding is not None and self.ending.idle(self.decoding.runner.while_idle)) or more

    def step(self) -> None:
        """Launch a decode step, read the tokens of the one before, and enqueue chunks of prompts behind it.

        The tokens are read earlier if the draws of this step depend on them. An error ends the sequences whose work
        failed, so that no client is left waiting. Raises GpuLostError.
        """
        scheduler, decoding = self.scheduler, self.decoding
        self.ending.is_short = False
        step = Step()
        drawn: list[tuple[PromptChunk, list[torch.Tensor]]] = []
        with self.ending.of(lambda: [*scheduler.waiting, *scheduler.running]):
            self._judge_host()
            self.alone = self.device.type == "cpu" and self.others.are_busy()
            if self.timer is not None:
                self.timer.read()
            self.seconds = 0.0
            pace = self.chunk_pace
            scheduler.idle_chunk, scheduler.beside_chunk = self._idle_pace.rows, (pace.rows, pace.cost)
            step = scheduler.next_step()
            if self.speculating is not None and step.chunks:
                step.chunks = self.speculating.offer(step.chunks)
        step = Step() if self.ending.is_short else step  # memory ran out: all are preempted
        self._report_finished()
        for sequence in step.joining:
            with self.ending.of(lambda: [sequence]):  # noqa: B023 - it is called here
                self._join(sequence, None)
        # A sequence that joined may have taken the slot of another one.
        launched = [sequence for sequence in step.launched if sequence.joined]
        checked = False
        if not launched or step.chunks:
            self._checked = None
        elif len(launched) < MOST_ROWS:
            with self.ending.of(lambda: launched):
                checked = self._check(launched)
        if checked:
            self._report_finished()
            return
        launched = [sequence for sequence in launched if sequence.joined]
        behind = decoding.behind if decoding is not None else 0
        follows = decoding is not None and bool(decoding.in_flight)
        if decoding is not None and launched:
            with self.ending.of(lambda: [*decoding.joined]):
                waits = decoding.launch(launched)
                self._launched(launched)
                if waits:
                    decoding.read(1, self._took, self._failed)
        # Report tokens before enqueuing a chunk, which may take the host as long as the device. Do not wait first for
        # the tokens drawn behind the last chunk: the next tokens would be late.
        self._read(behind + bool(launched))
        if step.chunks:
            rows = sum(chunk.count for chunk in step.prompts)
            with self.ending.of(lambda: [chunk.sequence for chunk in step.chunks], rows):
                drawn = self._run(step.chunks)
        self._read(int(bool(launched)))
        if self.speculating is not None and decoding is not None:
            alone = len(launched) <= MOST_ROWS and not step.chunks and not step.joining
            self._time(self.speculating, decoding.runner.firsts, launched if alone else [], follows)
        self._jump_ahead()
        self._draw_all(drawn)
        self._report_finished()

    def _check(self, launched: list[Sequence]) -> bool:
        """Run a step of these sequences that checks guesses, if that pays. False: launch them as usual."""
        speculating, decoding = self.speculating, self.decoding
        if speculating is None or decoding is None:
            return False
        began, firsts = perf_counter(), decoding.runner.firsts
        spans, reads = speculating.spans(launched), bool(decoding.in_flight)
        if reads:
            if not any(guesses for _, guesses in spans):
                return False
            self._read(0)
            began = perf_counter()
            spans = speculating.spans([sequence for sequence in launched if sequence.joined])
        guesses, waited = any(guesses for _, guesses in spans), began + speculating.apart_s
        if not guesses and not reads and waited == began:
            return False
        self._settle(began)
        self._launched_at = 0.0
        if not guesses:
            self._waiting = waited
            return False
        checked = decoding.check_guesses(spans, self._took, self._failed)
        for one in checked:
            speculating.checked(*one)
        if decoding.runner.firsts == firsts:
            self._checked = checked, waited
        return True

    def _settle(self, now: float) -> None:
        """Record the time of the last step that checked guesses: it ends when the device gets its next step."""
        if self._checked is not None and self.speculating is not None:
            self.speculating.saw(self._checked[0], now - self._checked[1])
        self._checked = None

    def _launched(self, sequences: list[Sequence]) -> None:
        """Record that the device has a step again: the time it was idle is a cost of guesses."""
        self._settle(now := perf_counter())
        if self._waiting and self.speculating is not None:
            self.speculating.waited(sequences, now - self._waiting)
        self._waiting = 0.0

    def _time(self, speculating: Speculating, firsts: int, launched: list[Sequence], follows: bool) -> None:
        """Record the time of steps launched back to back. `launched` is empty if other work was computed too."""
        now = perf_counter()
        if launched and follows and self._launched_at and firsts == self._firsts:
            speculating.saw([(sequence, 0, 0) for sequence in launched], now - self._launched_at)
        self._launched_at, self._firsts = now if launched else 0.0, firsts

    def _read(self, ahead: int) -> None:
        decoding = self.decoding
        if decoding is not None and decoding.in_flight:
            with self.ending.of(lambda: [*decoding.joined]):
                decoding.read(ahead, self._took, self._failed)

    def _run(self, chunks: list[PromptChunk]) -> list[tuple[PromptChunk, list[torch.Tensor]]]:
        """Compute chunks. Return those whose next token is drawn now, each with logits [vocab] of its row and of the
        rows of its guesses."""
        idle = chunks[0].sequence.priority is Priority.IDLE
        prompts = Step(chunks=chunks).prompts
        count = sum(chunk.count for chunk in chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        batch = StepBatch(tuple(chunk.span for chunk in chunks))
        self._share_cores(batch, idle)
        began = perf_counter()
        logits = self._logits(prompts, batch)
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
                    self.decode_s = seconds
            else:
                decoding = self.decode_s if len(prompts) < len(chunks) else 0.0
                self._saw(prompts, seconds - decoding)
        each = iter(logits)
        return [(chunk, [next(each) for _ in range(1 + len(chunk.guesses))]) for chunk in sampling]

    def _draw_all(self, drawn: list[tuple[PromptChunk, list[torch.Tensor]]]) -> None:
        """Draw the next tokens of these chunks, and record how their guesses did."""
        before = [chunk.sequence.accepted for chunk, _ in drawn]
        for chunk, logits in drawn:
            with self.ending.of(lambda: [chunk.sequence]):  # noqa: B023 - it is called here
                if self.speculating is not None:
                    self.speculating.draw(chunk, logits, self._draw)
                else:
                    self._draw(chunk.sequence, logits[0])
        if self.speculating is not None and self.seconds and all(chunk.count == 1 for chunk, _ in drawn):
            checked = [
                (chunk.sequence, len(chunk.guesses), chunk.sequence.accepted - held)
                for (chunk, _), held in zip(drawn, before, strict=True)
            ]
            self.speculating.saw(checked, self.seconds)

    def _draw(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Draw the first token after a chunk from logits [vocab]. The decode runner draws it without waiting for it."""
        if self.decoding is None:
            self._take(sequence, self._sample(sequence, logits))
            self._jump(sequence)
        else:
            self._join(sequence, logits)

    def _join(self, sequence: Sequence, logits: torch.Tensor | None) -> None:
        assert self.decoding is not None
        joined = self.decoding.joined
        # Idle work has a slot, or had one before a person waited for it.
        if len(joined) == self.decoding.runner.capacity:
            self.scheduler.preempt(max(*joined, sequence, key=lambda s: (s.priority, s.place)))
        if sequence.status is SequenceStatus.RUNNING:
            self.decoding.join(sequence, logits)

    def _took(self, sequence: Sequence, drawn: SampledToken) -> None:
        try:
            if sequence.known:
                self._take_again(sequence, drawn.token_id)
            else:
                self._take(sequence, drawn)
            if sequence.guide is not None:
                self._guided[sequence] = None
        except Exception as error:  # noqa: BLE001 - as above; the other sequences still get their tokens
            self.scheduler.finish(sequence, None, error)

    def _failed(self, sequence: Sequence, error: Exception) -> None:
        self.scheduler.finish(sequence, None, error)

    def _take_again(self, sequence: Sequence, token_id: int) -> None:
        """Take a token that was reported before. If another one is drawn now, leave the slot: the next step then gets
        the earlier one."""
        known = sequence.known.pop(0)
        sequence.generated.append(known)
        sequence.rows.append(known)
        if known != token_id:
            assert self.decoding is not None
            self.decoding.leave(sequence)

    @property
    def _idle_pace(self) -> IdlePace:
        return self.pace_alone if self.alone else self.pace

    def _logits(self, prompts: list[PromptChunk], batch: StepBatch) -> list[torch.Tensor]:
        if self.timer is None:
            return self.runner.run(batch)
        firsts = self.runner.firsts
        logits = self.timer.of(partial(self._saw, prompts), lambda: self.runner.run(batch))
        if self.runner.firsts != firsts:
            self.timer.forget()
        return logits

    def _saw(self, prompts: list[PromptChunk], seconds: float) -> None:
        """Record the seconds that a batch of these prompt chunks took."""
        scheduler, rows = self.scheduler, sum(chunk.count for chunk in prompts)
        computed = scheduler.recorded.computed(len(prompts), rows)
        cost = sum(scheduler.row_cost.cost(chunk.start, chunk.count) for chunk in prompts)
        self.chunk_pace.saw(computed, cost + computed - rows, seconds)
        if self.cache.host is not None and self.timer is not None:
            self.cache.host.costs.saw(rows, seconds)
        if self.disk is not None:
            self.disk.costs.saw(rows, seconds)

    def _judge_host(self) -> None:
        """Prepare the host tier in time; drop it once computing a block is known to be about as fast."""
        host = self.cache.host
        if host is None:
            return
        if not host.costs.worth_it:
            self.cache.host = None
            self.blocks.tier.end()
            host.tell(None)
            host.close()
        elif self.blocks.num_free < self.blocks.num_blocks // 2:
            host.prepare()

    def _share_cores(self, batch: StepBatch, idle: bool) -> None:
        """Give torch all CPU threads for prompts only, and idle work one core while other programs are busy.

        With the native kernels torch only samples: its threads would keep spinning and slow down the next step.
        """
        # All ranks have as many threads: the same bits.
        if self.device.type != "cpu" or self.runner.is_divided:
            return
        alone = idle and self.alone
        self.runner.set_alone(alone)
        wanted = self.threads if self.runner.uses_torch(batch) and not alone else 1
        if self.torch_threads != wanted:
            self.torch_threads = wanted
            torch.set_num_threads(wanted)

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> SampledToken:
        """Sample the next token; -1 if the logits are not numbers."""
        params, guide = sequence.params, sequence.guide
        assert params is not None
        if sequence.sampler is None:
            seeded = replace(params, seed=sequence.seed)
            sequence.sampler = SamplerState.create(
                seeded, sequence.rows.token_ids, logits.shape[-1], logits.device, sequence.generated
            )
        mask = None
        if guide is not None:
            guide.follow(sequence.generated)
            words, numbers = sequence.sampler.room_of_mask(len(logits))
            guide.fill(numbers)
            mask = words if logits.device.type == "cpu" else words.to(logits.device)
        token_id = sample(logits, sequence.sampler, mask)
        self.watch()
        if token_id >= 0:
            sequence.sampler.note(token_id)
        return (
            SampledToken(token_id)
            if params.logprobs is None
            else log_chances(logits, token_id, params.logprobs)
        )

    def _jump(self, sequence: Sequence, fewest: int = 1) -> None:
        """Take the tokens that a constraint forces after the newest one, if there are at least `fewest`.

        Their rows are computed together. No token is taken if log-probabilities are asked for: each needs its logits.
        """
        guide, params = sequence.guide, sequence.params
        assert params is not None
        if guide is None or params.logprobs is not None or sequence.known:
            return
        while sequence.status is SequenceStatus.RUNNING and sequence.told < MOST_FORCED:
            guide.follow(sequence.generated)
            forced = guide.forced()[: MOST_FORCED - sequence.told]
            if len(forced) < fewest:
                return
            if sequence.joined and self.decoding is not None:
                self.decoding.leave(sequence)
            for token_id in forced:
                if sequence.status is SequenceStatus.RUNNING:
                    self._force(sequence, token_id)
            fewest = 1

    def _force(self, sequence: Sequence, token_id: int) -> None:
        if sequence.sampler is not None:
            sequence.sampler.skip(token_id)
        told = sequence.told
        self._take(sequence, SampledToken(token_id))
        sequence.told = told + 1

    def _jump_ahead(self) -> None:
        """Have sequences leave their slots and jump where that saves far more steps than it costs the others."""
        jumping, self._guided = self._guided, {}
        for sequence in jumping:
            if self.jumps and self.decoding is not None and sequence.joined:
                with self.ending.of(lambda: [sequence]):  # noqa: B023 - it is called here
                    self._jump(sequence, FEWEST_FORCED * len(self.decoding.joined))

    def _take(self, sequence: Sequence, drawn: SampledToken) -> None:
        """Record a new token: update the text, send the event, and finish the sequence if it ends here."""
        output, rows, token_id = sequence.output, sequence.rows, drawn.token_id
        assert output is not None
        if token_id < 0:
            raise EngineError(
                "The model's output is not a number; its weights are damaged, or the dtype is too narrow for it: "
                "try --dtype float32."
            )
        now = perf_counter()
        if sequence.priority is Priority.PERSON:
            self.scheduler.tally.drew(sequence, now)
        sequence.last_token, sequence.first_token = now, sequence.first_token or now
        sequence.generated.append(token_id)
        rows.append(token_id)
        sequence.told = 1
        reason: FinishReason | None = FinishReason.EOS
        if token_id in self.stop_ids:
            event = output.end(token_id)
        else:
            event = output.push(token_id)
            reason = sequence.ending or (FinishReason.CONTEXT_FULL if self.scheduler.is_full(rows) else None)
            if reason is not None:
                event = replace(event, text=event.text + output.flush())
        if token_id == sequence.expected:
            event = replace(event, guessed=True)
        sequence.expected = -1
        if drawn.logprob is not None:
            event = replace(event, logprob=drawn.logprob, top=drawn.top)
        sequence.events.put(event)
        if reason is not None:
            self.scheduler.finish(sequence, reason)

    def _report_finished(self) -> None:
        """Report the sequences that have ended. Raises GpuLostError, which ends the loop, if one ended with it."""
        for sequence in self.scheduler.finished:
            self._report(sequence)
        errors = [sequence.error for sequence in self.scheduler.finished if sequence.error is not None]
        self.scheduler.finished.clear()
        if lost := [error for error in errors if isinstance(error, GpuLostError)]:
            raise GpuLostError(*lost[0].args)
        # Not earlier: the frames of an error hold the tensors that were being computed.
        if (errors or self.ending.is_short) and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _report(self, sequence: Sequence) -> None:
        sequence.error = sequence.error and explain(sequence.error)
        if sequence.output is not None:
            sequence.tail = sequence.output.flush()
            sequence.output.guide = None
        if self.speculating is not None:
            self.speculating.ended(sequence)
        sequence.sampler = None  # as large as the vocabulary, and a finished sequence may be kept for long
        sequence.finished.set()
        sequence.events.put(None)

    def end(self, error: EngineError | None) -> None:
        """End every sequence because the loop ends, with `error` if any: no client may be left waiting."""
        if self.disk is not None:
            with suppress(Exception):
                self.disk.abandon()
        # The scheduler and the blocks are no longer needed, and may be what failed.
        scheduler = self.scheduler
        for sequence in [*scheduler.waiting, *scheduler.running, *scheduler.finished]:
            sequence.finish_reason = sequence.finish_reason or FinishReason.CANCELLED
            sequence.error = sequence.error or error
            self._report(sequence)
