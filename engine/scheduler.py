"""Which sequences run in the next step, and how many of their rows."""

from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from time import perf_counter

from engine.blocks import BlockManager, BlockTable, Copy, Key, OutOfBlocksError
from engine.errors import EngineError
from engine.events import FinishReason
from engine.found import found
from engine.sequence import Priority, Sequence, Status


class MaskedRowsEvictedError(EngineError):
    """Rows that were computed with a think span in view are gone; their turn has to be computed again."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `start + count` of a sequence. With `samples`, its next token is drawn after them."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """The chunk reaches the end of the rows of a sequence that generates."""
        return self.sequence.params is not None and self.start + self.count == len(self.sequence.rows)


@dataclass(slots=True)
class Step:
    """What to do next: first the copies, then the chunks in one batch."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


@dataclass(slots=True)
class Scheduler:
    """People first: idle work runs only while no person waits for anything, in chunks short enough to give way.

    A sequence waits, runs (it holds a block table) and finishes. Where blocks run out, idle work ends. A person's
    sequence first takes what idle work may have too, then sends idle work back to waiting, then takes what the
    conversation in use has cached beyond the sequence's own blocks, then sends back the youngest that runs. What a
    sequence that is sent back had computed stays as cache.
    """

    blocks: BlockManager
    max_chunk: int
    """Most prefill rows in one step."""
    idle_chunk: int
    """The same for idle work; `IdlePace` adjusts it to what a person may wait for."""
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    """Ended by the scheduler itself since the engine last looked."""

    @property
    def has_work(self) -> bool:
        """There is something to run."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason | None, error: Exception | None = None) -> None:
        """End a sequence wherever it stands. Its written rows stay as cache."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        self.finished.append(sequence)

    def next_step(self) -> Step:
        """Choose the next step; empty when nothing can run."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.cancelled:
                self.finish(sequence, FinishReason.CANCELLED)
        step = Step()
        level = min((s.priority for s in [*self.waiting, *self.running]), default=Priority.IDLE)
        self._admit(level, step)
        budget = self.max_chunk if level is Priority.PERSON else self.idle_chunk
        # Decoding sequences first: a person who reads must not stumble over another's long prompt.
        for sequence in sorted(self.running, key=lambda s: s.pending):
            if sequence.priority is not level or sequence.status is not Status.RUNNING:
                continue
            if sequence.pending == 0:  # nothing to generate and everything warm
                self.finish(sequence, None)
                continue
            if budget == 0:
                break
            count = min(sequence.pending, budget)
            if not self._reserve(sequence, count, step):
                continue
            step.chunks.append(Chunk(sequence, sequence.computed, count))
            budget -= count
        # A reservation may have sent an earlier choice back to waiting.
        step.chunks = [chunk for chunk in step.chunks if chunk.sequence.status is Status.RUNNING]
        return step

    def done(self, step: Step) -> None:
        """The rows of the step are written: from now on they can be found."""
        for chunk in step.chunks:
            table = chunk.sequence.table
            if table is not None:
                sequence, stop = chunk.sequence, chunk.start + chunk.count
                self.blocks.commit(table, sequence.rows.keys[chunk.start : stop], repeat(sequence.origin))

    def reserve(self, table: BlockTable, rows: int, idle: bool = False) -> list[Copy]:
        """Make room for `rows` more rows in a table; unless it is `idle` itself, idle work may have to wait for that.

        Returns what to copy before anything is written. Raises OutOfBlocksError when there is no room.
        """
        while True:
            others = [s for s in self.running if s.priority is Priority.IDLE and s.table is not table]
            try:
                return self.blocks.reserve(table, rows, idle or bool(others))
            except OutOfBlocksError:
                if idle or not others:
                    raise
                self._send_back(others[-1])

    def _admit(self, level: Priority, step: Step) -> None:
        for sequence in [s for s in self.waiting if s.priority is level]:
            keys = sequence.rows.keys
            # The last row of a prompt is always computed: its logits are needed.
            table = self._open(keys[:-1] if sequence.params is not None else keys, level, step)
            sequence.table = table
            sequence.status = Status.RUNNING
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if sequence.computed < sequence.rows.masked_until:
                self.finish(sequence, None, MaskedRowsEvictedError("masked rows were evicted"))
                continue
            if sequence.admitted == 0.0:
                sequence.admitted = perf_counter()
                sequence.found = found(self.blocks, table, keys, sequence.origin)

    def _open(self, keys: list[Key], level: Priority, step: Step) -> BlockTable:
        """Open what is there of `keys`. What idle work leaves no room for in the cache makes that work wait."""
        while True:
            table, copies = self.blocks.open(keys, level is Priority.IDLE)
            step.copies += copies
            others = [s for s in self.running if s.priority is Priority.IDLE]
            if level is Priority.IDLE or not others or table.length >= self.blocks.match(keys):
                return table
            self.blocks.close(table)
            self._send_back(others[-1])

    def _reserve(self, sequence: Sequence, rows: int, step: Step) -> bool:
        """Make room; on the way others may lose their blocks, or `sequence` itself may end or have to wait."""
        assert sequence.table is not None
        while True:
            try:
                step.copies += self.reserve(sequence.table, rows, sequence.priority is Priority.IDLE)
                return True
            except OutOfBlocksError:
                if sequence.priority is Priority.IDLE or self.running == [sequence]:
                    self.finish(sequence, FinishReason.CONTEXT_FULL)
                    return False
                youngest = self.running[-1]
                self._send_back(youngest)
                if youngest is sequence:
                    return False

    def _send_back(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence.table is not None:
            sequence.reached = sequence.table.length
            self.blocks.close(sequence.table)
            sequence.table = None
