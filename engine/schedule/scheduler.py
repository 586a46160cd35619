"""Which sequences run in the next step, and how many of their rows."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat
from time import perf_counter

from engine.cache.blocks import BlockManager, BlockTable, OutOfBlocksError
from engine.cache.prefix_hit import found
from engine.cache.prefix_index import Key
from engine.errors import EngineError
from engine.events import FinishReason
from engine.schedule.sequence import Priority, Sequence, Status


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
    """What to compute next, in one batch."""

    chunks: list[Chunk] = field(default_factory=list)


@dataclass(slots=True)
class Scheduler:
    """People first: idle work runs only while no person waits for anything, in chunks short enough to give way.

    A sequence waits, runs (it holds a block table) and finishes. Who comes first is served first: a person's sequence
    runs once there is room for all its rows and those before it run, and of a step the rows that decoding leaves go to
    prompts in the order in which they came.

    Where blocks run out, idle work ends. A person's sequence first takes what idle work may have too, then sends idle
    work back to waiting, then takes what the conversation in use has cached beyond the sequence's own blocks, then
    sends back the youngest that runs. What a sequence that is sent back had computed stays as cache.
    """

    blocks: BlockManager
    max_chunk: int
    """Most prefill rows in one step."""
    idle_chunk: int
    """The same for idle work; `IdlePace` adjusts it to what a person may wait for."""
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    """Ended by the scheduler itself since the engine last looked."""
    arrivals: Iterator[int] = field(default_factory=count)

    @property
    def has_work(self) -> bool:
        """There is something to run, or to tell of."""
        return bool(self.waiting or self.running or self.finished)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.arrival = next(self.arrivals)
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
        """Choose the next step; empty when nothing can run. A sequence whose rows cannot be copied ends with that."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.cancelled:
                self.finish(sequence, FinishReason.CANCELLED)
        level = min((s.priority for s in [*self.waiting, *self.running]), default=Priority.IDLE)
        self._admit(level)
        budget = self.max_chunk if level is Priority.PERSON else self.idle_chunk
        chunks: list[Chunk] = []
        # Decoding sequences first: a person who reads must not stumble over another's long prompt.
        for sequence in sorted(self.running, key=lambda s: (not s.decodes, s.arrival)):
            if sequence.priority is not level or sequence.status is not Status.RUNNING:
                continue
            if sequence.pending == 0:  # nothing to generate and everything warm
                self.finish(sequence, None)
                continue
            if budget == 0:
                break
            rows = min(sequence.pending, budget)
            if not self._reserve(sequence, rows):
                continue
            chunks.append(Chunk(sequence, sequence.computed, rows))
            budget -= rows
        # A reservation may have sent an earlier choice back to waiting.
        return Step([chunk for chunk in chunks if chunk.sequence.status is Status.RUNNING])

    def done(self, step: Step) -> None:
        """The rows of the step are written: from now on they can be found."""
        for chunk in step.chunks:
            table = chunk.sequence.table
            if table is not None:
                sequence, stop = chunk.sequence, chunk.start + chunk.count
                self.blocks.commit(table, sequence.rows.keys[chunk.start : stop], repeat(sequence.origin))

    def reserve(self, table: BlockTable, rows: int, idle: bool = False) -> None:
        """Make room for `rows` more rows in a table; unless it is `idle` itself, idle work may have to wait for that.

        Raises as `BlockManager.reserve` does.
        """
        while True:
            others = [s for s in self._idle_work if s.table is not table]
            try:
                return self.blocks.reserve(table, rows, idle or bool(others))
            except OutOfBlocksError:
                if idle or not others:
                    raise
                self._send_back(others[-1])

    @property
    def _idle_work(self) -> list[Sequence]:
        return [s for s in self.running if s.priority is Priority.IDLE]

    def _admit(self, level: Priority) -> None:
        for sequence in sorted((s for s in self.waiting if s.priority is level), key=lambda s: s.arrival):
            if level is Priority.PERSON and not self._make_room(sequence):
                break
            keys = sequence.rows.keys
            try:
                # The last row of a prompt is always computed: its logits are needed.
                table = self._open(keys[:-1] if sequence.params is not None else keys, level)
            except Exception as error:  # noqa: BLE001 - whatever a copy raises is this sequence's alone
                self.finish(sequence, None, error)
                continue
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

    def _make_room(self, sequence: Sequence) -> bool:
        """Whether a person's sequence may run beside those that do: there is room for all its rows and the next one,
        and for all of theirs and one more block each, or it would be sent back at once.

        Idle work waits where that helps. Alone it may always run: it ends where the context does.
        """
        while beside := [s for s in self.running if s.priority is Priority.PERSON]:
            needed = self.blocks.needs(sequence.rows.keys, len(sequence.rows) + 1)
            for other in beside:
                held = len(other.table.blocks) if other.table is not None else 0
                needed += max(self.blocks.blocks_for(len(other.rows)) + 1 - held, 0)
            if needed <= self.blocks.room():
                return True
            if not self._idle_work:
                return False
            self._send_back(self._idle_work[-1])
        return True

    def _open(self, keys: list[Key], level: Priority) -> BlockTable:
        """Open what is there of `keys`. What idle work leaves no room for in the cache makes that work wait."""
        while True:
            table = self.blocks.open(keys, level is Priority.IDLE)
            others = self._idle_work
            if level is Priority.IDLE or not others or table.length >= self.blocks.match(keys):
                return table
            self.blocks.close(table)
            self._send_back(others[-1])

    def _reserve(self, sequence: Sequence, rows: int) -> bool:
        """Make room; on the way others may lose their blocks, or `sequence` itself may end or have to wait."""
        assert sequence.table is not None
        while True:
            try:
                self.reserve(sequence.table, rows, sequence.priority is Priority.IDLE)
                return True
            except OutOfBlocksError:
                if sequence.priority is Priority.IDLE or self.running == [sequence]:
                    self.finish(sequence, FinishReason.CONTEXT_FULL)
                    return False
                youngest = max(self.running, key=lambda s: s.arrival)
                self._send_back(youngest)
                if youngest is sequence:
                    return False
            except Exception as error:  # noqa: BLE001 - as above
                self.finish(sequence, None, error)
                return False

    def _send_back(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.status = Status.WAITING
        self.waiting.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence.table is not None:
            sequence.reached = sequence.table.length
            self.blocks.close(sequence.table)
            sequence.table = None
