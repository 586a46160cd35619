"""A step of the engine: compute what the scheduler chose, and report the results."""

from contextlib import suppress
from dataclasses import dataclass, field

import torch

from engine.errors import EngineError, GpuLostError
from engine.events import FinishReason
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.faults import explain
from engine.schedule.answers import Answers
from engine.schedule.computing import Computing
from engine.schedule.decoding import Decoding
from engine.schedule.ending import Ending
from engine.schedule.scheduler import PromptChunk, Scheduler, Step
from engine.schedule.sequence import Sequence
from engine.schedule.slot_guesses import SlotGuesses
from engine.schedule.speculating import Speculating
from engine.speculation.cost_model import MOST_ROWS
from engine.store.disk import DiskTier


@dataclass(slots=True)
class EngineStep:
    """Runs steps. Only the loop thread may use it."""

    scheduler: Scheduler
    computing: Computing
    answers: Answers
    decoding: Decoding | None = None
    """None: sequences decode in the same batch as prompt chunks, and the host samples."""
    jumps: bool = True
    """Whether rows of an answer in a slot may be computed like those of a prompt."""
    speculating: Speculating | None = None
    """None: speculation is off."""
    disk: DiskTier | None = None
    ending: Ending = field(init=False)
    _slot_guesses: SlotGuesses = field(default_factory=SlotGuesses)

    def __post_init__(self) -> None:
        self.ending = Ending(self.scheduler)

    def decode_with(self, runner: DecodeRunner[Sequence]) -> None:
        """Decode in slots of `runner` from now on. No sequence may be running."""
        self.decoding = Decoding(runner, self.scheduler, self.answers, self.ending)
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
        self.computing.leave_cores()
        if self.speculating is not None and self.ending.idle(self.speculating.while_idle):
            return True
        if self.computing.device.type == "cpu":
            return self.computing.runner.while_idle() or more
        return (self.decoding is not None and self.ending.idle(self.decoding.runner.while_idle)) or more

    def step(self) -> None:
        """Launch a decode step, read the tokens of the one before, and enqueue chunks of prompts behind it.

        The tokens are read earlier if the draws of this step depend on them. An error ends the sequences whose work
        failed, so that no client is left waiting. Raises GpuLostError.
        """
        scheduler, decoding, speculating = self.scheduler, self.decoding, self.speculating
        self.ending.is_short = False
        step = Step()
        with self.ending.of(lambda: [*scheduler.waiting, *scheduler.running]):
            self.computing.begin()
            step = scheduler.next_step()
            if speculating is not None and step.chunks:
                step.chunks = speculating.offer(step.chunks)
        step = Step() if self.ending.is_short else step  # memory ran out: all are preempted
        self._report_finished()
        if decoding is None:
            self._draw_all([*self._compute(step.chunks), *self._remembered(step.known)])
        else:
            self._decode(step, decoding)
        self._report_finished()

    def _decode(self, step: Step, decoding: Decoding) -> None:
        """Run a step of the sequences in slots, and the chunks behind it."""
        speculating, guesses = self.speculating, self._slot_guesses
        for sequence in step.joining:
            with self.ending.of(lambda: [sequence]):  # noqa: B023 - it is called here
                decoding.join(sequence, None)
        # A sequence that joined may have taken the slot of another one.
        launched = [sequence for sequence in step.launched if sequence.joined]
        if not launched or step.chunks or step.known:
            guesses.forget()
        elif speculating is not None and len(launched) < MOST_ROWS:
            with self.ending.of(lambda: launched):
                if guesses.check(speculating, decoding, launched):
                    return
        launched = [sequence for sequence in launched if sequence.joined]
        behind, follows = decoding.behind, bool(decoding.in_flight)
        if launched:
            with self.ending.of(lambda: [*decoding.joined]):
                waits = decoding.launch(launched)
                if speculating is not None:
                    guesses.launched(speculating, launched)
                if waits:
                    decoding.draw()
        # Report tokens before enqueuing a chunk, which may take the host as long as the device. Do not wait first for
        # the tokens drawn behind the last chunk: the next tokens would be late.
        decoding.read(behind + bool(launched))
        drawn = [*self._compute(step.chunks), *self._remembered(step.known)]
        decoding.read(int(bool(launched)))
        if speculating is not None:
            alone = len(launched) <= MOST_ROWS and not step.chunks and not step.joining
            guesses.time(speculating, decoding.runner.firsts, launched if alone else [], follows)
        decoding.jump_ahead(self.jumps)
        self._draw_all(drawn)

    def _compute(self, chunks: list[PromptChunk]) -> list[tuple[PromptChunk, list[torch.Tensor]]]:
        """Compute chunks (see `Computing.run`), if there are any. Return an empty list if that fails."""
        drawn: list[tuple[PromptChunk, list[torch.Tensor]]] = []
        if chunks:
            rows = sum(chunk.count for chunk in Step(chunks=chunks).prompts)
            with self.ending.of(lambda: [chunk.sequence for chunk in chunks], rows):
                drawn = self.computing.run(chunks, self.disk)
        return drawn

    def _remembered(self, known: list[PromptChunk]) -> list[tuple[PromptChunk, list[torch.Tensor]]]:
        """Do what `_compute` does for prompts whose logits are remembered."""
        found = []
        for chunk in known:
            logits, chunk.sequence.logits = chunk.sequence.logits, None
            assert logits is not None
            found.append((chunk, [logits.clone()]))  # drawing may change them
        return found

    def _draw_all(self, drawn: list[tuple[PromptChunk, list[torch.Tensor]]]) -> None:
        """Draw the next tokens of these chunks, and record how their guesses did."""
        before = [chunk.sequence.accepted for chunk, _ in drawn]
        for chunk, logits in drawn:
            with self.ending.of(lambda: [chunk.sequence]):  # noqa: B023 - it is called here
                if self.speculating is not None:
                    self.speculating.draw(chunk, logits, self._draw)
                else:
                    self._draw(chunk.sequence, logits[0])
        if (
            self.speculating is not None
            and self.computing.seconds
            and all(chunk.count == 1 for chunk, _ in drawn)
        ):
            checked = [
                (chunk.sequence, len(chunk.guesses), chunk.sequence.accepted - held)
                for (chunk, _), held in zip(drawn, before, strict=True)
            ]
            self.speculating.saw(checked, self.computing.seconds)

    def _draw(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Draw the first token after a chunk from logits [vocab]. A decode runner draws it without waiting for it."""
        if self.decoding is not None:
            self.decoding.join(sequence, logits)
        else:
            self.answers.take(sequence, self.answers.sample(sequence, logits))
            self.answers.jump(sequence)

    def _report_finished(self) -> None:
        """Report the sequences that have ended. Raises GpuLostError, which ends the loop, if one ended with it."""
        for sequence in self.scheduler.finished:
            self._report(sequence)
        errors = [sequence.error for sequence in self.scheduler.finished if sequence.error is not None]
        self.scheduler.finished.clear()
        if lost := [error for error in errors if isinstance(error, GpuLostError)]:
            raise GpuLostError(*lost[0].args)
        # Not earlier: the frames of an error hold the tensors that were being computed.
        if (errors or self.ending.is_short) and self.computing.device.type == "cuda":
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
