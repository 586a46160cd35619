"""Which sequences run in the next step, and how many of their rows."""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, repeat
from math import inf
from sys import maxsize
from time import perf_counter

from engine.batch import Recorded, Span
from engine.cache.blocks import BlockManager, BlockTable, OutOfBlocksError
from engine.cache.prefix_hit import prefix_hit
from engine.cache.prefix_index import Key
from engine.cache.rows import Rows
from engine.errors import EngineError
from engine.events import FinishReason
from engine.schedule.chunk_pace import FEWEST, PADDING, RowCost
from engine.schedule.sequence import Priority, Sequence, Status
from engine.schedule.tally import Tally


class MaskedRowsEvictedError(EngineError):
    """Rows that were computed with a think span in view are gone; their turn has to be computed again."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `start + count` of a sequence. With `samples`, its next token is drawn after them.

    Then tokens may be guessed: their rows are computed, too, and count as soon as just these tokens were drawn.
    """

    sequence: Sequence
    start: int
    count: int
    guesses: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """The chunk reaches the end of the rows of a sequence that generates."""
        return self.sequence.params is not None and self.start + self.count == len(self.sequence.rows)

    @property
    def span(self) -> Span:
        """What is to be computed. An answer that goes on is a prompt as far as it has to be computed again.

        One row of it is a decode step.
        """
        sequence, rows = self.sequence, self.sequence.rows
        assert sequence.table is not None
        at = slice(self.start, self.start + self.count)
        more = len(self.guesses)
        return Span(
            tuple(sequence.table.blocks),
            self.start,
            self.count + more,
            [*rows.token_ids[at], *self.guesses],
            [*rows.positions[at], *range(rows.next_position, rows.next_position + more)],
            int(self.samples) + more,
            sequence.prompt_tokens - (sequence.earlier if self.count == 1 else 0),
        )


@dataclass(slots=True)
class Step:
    """What to compute next: a decode step of the sequences in slots, and beside it one batch of chunks."""

    launched: list[Sequence] = field(default_factory=list)
    """They have slots of a decode runner, and room for the row of their newest token."""
    joining: list[Sequence] = field(default_factory=list)
    """All that they lack is the row of a token of their answers: they need a slot, and no chunk."""
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def prompts(self) -> list[Chunk]:
        """Those that are not the next row of an answer."""
        return [chunk for chunk in self.chunks if not chunk.sequence.decodes]


@dataclass(slots=True)
class Scheduler:
    """People first: idle work runs only while no person waits for anything, in chunks short enough to give way.

    A sequence waits, runs (it holds a block table), is preempted where blocks run out, runs again, and finishes.
    Clients take turns, and who comes first is served first: a person's sequence runs once there is room for all its
    rows and those before it run, and of a step the rows that decoding leaves go to prompts in that order
    (`Sequence.place`). A preempted sequence keeps its place, and none is preempted for one behind it: so the oldest
    always gets on, and everybody finishes.

    Where blocks run out, idle work ends. A person's sequence first takes what idle work may have too, then preempts
    idle work, then takes what the conversation in use has cached beyond the sequence's own blocks, then preempts the
    last in that order that runs. What a preempted sequence had computed stays as cache, or goes to host memory.

    Where there is a decode runner, sequences that decode have a slot of it (`Sequence.joined`). Without one their rows
    are chunks like those of prompts.
    """

    blocks: BlockManager
    max_chunk: int
    """Most prefill rows in one step."""
    idle_chunk: int
    """The same for idle work; `IdlePace` adjusts it to what a person may wait for."""
    beside_chunk: tuple[int, float] = (maxsize, inf)
    """Most of them where others decode, and what they may cost; `ChunkPace` adjusts both to how long their tokens may
    be delayed."""
    row_cost: RowCost = field(default_factory=RowCost)
    recorded: Recorded = field(default_factory=Recorded)
    slots: int = 0
    """Of the decode runner; 0 where there is none."""
    leave: Callable[[Sequence], None] = lambda sequence: None
    """Gives a slot back."""
    context_length: int = maxsize
    max_positions: int = maxsize
    waiting: list[Sequence] = field(default_factory=list)
    """New or preempted, in the order of their arrival."""
    running: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    """Ended by the scheduler itself since the engine last looked."""
    arrivals: Iterator[int] = field(default_factory=count)
    turn: int = 0
    """The furthest one that has begun to be computed: who comes now is behind at most one that waits of each client."""
    tally: Tally = field(default_factory=Tally)
    idle_turn: Sequence | None = None
    """Whose idle work the last step did; None: no idle work."""

    @property
    def has_work(self) -> bool:
        """There is something to run, or to tell of."""
        return bool(self.waiting or self.running or self.finished)

    @property
    def most_running(self) -> int:
        """How many sequences run at once: each needs a block, and a slot or a row of each step."""
        return min(self.slots or self.max_chunk, self.blocks.num_blocks)

    def is_full(self, rows: Rows, more: int = 0) -> bool:
        """Whether nothing fits into the context behind `rows` and so many `more`."""
        return len(rows) + more >= self.context_length or rows.next_position + more >= self.max_positions

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.arrival = next(self.arrivals)
        unfinished = [
            one.turn for one in (*self.waiting, *self.running) if one.client == sequence.client is not None
        ]
        sequence.turn = 1 + max([self.turn, *unfinished])
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason | None, error: Exception | None = None) -> None:
        """End a sequence wherever it stands. Its written rows stay as cache."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:  # its blocks are on their way from the disk: it ends when it comes
            sequence.cancelled = True
            return
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        self.finished.append(sequence)

    def cancel_all(self) -> None:
        """Nobody waits for anything any more: everything ends with the next step."""
        for sequence in [*self.waiting, *self.running]:
            sequence.cancelled = True

    def next_step(self) -> Step:
        """Choose the next step; empty when nothing can run. A sequence whose rows cannot be copied ends with that."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.cancelled:
                self.finish(sequence, FinishReason.CANCELLED)
        level = min((s.priority for s in [*self.waiting, *self.running]), default=Priority.IDLE)
        self._admit(level)
        self._catch_up(level)
        # Decoding sequences first: a person who reads must not stumble over another's long prompt.
        mine = sorted(
            (s for s in self.running if s.priority is level), key=lambda s: (not self._decodes(s), s.place)
        )
        step = Step()
        for sequence in mine:
            if sequence.joined and self._goes_on(sequence) and self._reserve(sequence, 1):
                step.launched.append(sequence)
        self._add_chunks(step, mine, self.max_chunk if level is Priority.PERSON else self.idle_chunk)
        # A reservation may have preempted an earlier choice.
        step.launched = [sequence for sequence in step.launched if sequence.joined]
        step.joining = [sequence for sequence in step.joining if sequence.status is Status.RUNNING]
        step.chunks = [chunk for chunk in step.chunks if chunk.sequence.status is Status.RUNNING]
        return step

    def _catch_up(self, level: Priority) -> None:
        """Idle work whose turn it is again takes what others have computed of its rows meanwhile."""
        first = min(
            (s for s in self._idle_work if s.pending and not s.joined), key=lambda s: s.place, default=None
        )
        before, self.idle_turn = self.idle_turn, first if level is Priority.IDLE else None
        if self.idle_turn is None or first is None or first is before or first.generated:
            return
        if self.blocks.match(first.rows.keys[:-1]) > first.computed:
            self.preempt(first)
            self._admit(level)

    def _comes(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Whether one of `chunks` belongs to somebody who computes the next row, too: it need not be done twice."""
        upto = sequence.computed + 1
        keys = sequence.rows.keys[:upto]
        return any(chunk.sequence.rows.keys[:upto] == keys for chunk in chunks)

    def _add_chunks(self, step: Step, mine: list[Sequence], budget: int) -> None:
        """Give `budget` rows of the step to those without a slot, in their order; prompts beside decoding get fewer."""
        beside = any(self._decodes(sequence) for sequence in mine)
        for sequence in mine:
            if sequence.joined or sequence.status is not Status.RUNNING:
                continue
            if sequence.pending == 0:  # nothing to generate and everything warm
                self.finish(sequence, None)
                continue
            if sequence.priority is Priority.IDLE and self._comes(sequence, step.chunks):
                continue
            if self.slots and sequence.pending == 1 and sequence.generated:
                step.joining.append(sequence)
                continue
            rows = min(sequence.pending, budget)
            if beside and not self._decodes(sequence):
                rows = self._beside(step.prompts, sequence, rows)
            if rows <= 0:
                break
            if not self._reserve(sequence, rows):
                continue
            step.chunks.append(Chunk(sequence, sequence.computed, rows))
            if sequence.priority is Priority.PERSON:
                self.turn = max(self.turn, sequence.turn)
            budget -= rows

    def _beside(self, before: list[Chunk], sequence: Sequence, rows: int) -> int:
        """How many of `rows` rows of a prompt come into a step beside decoding, after the chunks `before` it."""
        most, cost = self.beside_chunk
        taken, count = sum(chunk.count for chunk in before), len(before) + 1
        # A longer one is enqueued kernel by kernel, and the host takes longer for that than the device may.
        most = min(most, self.recorded.most(count))
        left = cost - sum(self.row_cost.cost(chunk.start, chunk.count) for chunk in before)
        fewest = min(FEWEST, most, rows) if not before else 0
        rows = min(rows, most - taken, self.row_cost.rows(sequence.computed, left))
        if rows <= fewest:
            return fewest
        padding = self.recorded.computed(count, taken + rows) - taken - rows
        used = self.row_cost.cost(sequence.computed, rows) + padding
        if taken + rows + padding > PADDING * most or used > left + (PADDING - 1) * cost:
            rows = self.recorded.whole(count, taken + rows) - taken
        return rows

    def done(self, step: Step) -> None:
        """The rows of the chunks are written: from now on they can be found."""
        for chunk in step.chunks:
            self.commit(chunk.sequence, chunk.start, chunk.count)

    def commit(self, sequence: Sequence, start: int, count: int) -> None:
        """The same of rows `start` to `start + count` of a sequence, which follow those that are."""
        if sequence.table is not None:
            keys = sequence.rows.keys[start : start + count]
            self.blocks.commit(sequence.table, keys, repeat(sequence.origin))

    def reserve(self, table: BlockTable, rows: int, idle: bool = False) -> None:
        """Make room for `rows` more rows in a table; unless it is `idle` itself, idle work may have to wait for that.

        Raises as `BlockManager.reserve` does.
        """
        if self.blocks.blocks_for(table.length + rows) - len(table.blocks) <= self.blocks.num_free:
            return self.blocks.reserve(table, rows)
        while True:
            others = [s for s in self._idle_work if s.table is not table]
            try:
                return self.blocks.reserve(table, rows, idle or bool(others))
            except OutOfBlocksError:
                if idle or not others:
                    raise
                self.preempt(others[-1])

    def preempt(self, sequence: Sequence) -> None:
        """Have a running sequence wait until there is room for it again. Its written rows stay as cache.

        Tokens that the host has not read are drawn again then. With a decode runner, so are those whose rows were lost:
        a row of an answer is always computed by a decode step, and the seed and the step decide which token follows it.
        """
        self._release(sequence)
        sequence.status = Status.PREEMPTED
        sequence.preemptions += 1
        self.tally.preemptions += sequence.priority is Priority.PERSON
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    @property
    def _idle_work(self) -> list[Sequence]:
        return [s for s in self.running if s.priority is Priority.IDLE]

    def _decodes(self, sequence: Sequence) -> bool:
        return sequence.joined or (not self.slots and sequence.decodes)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether another token may follow the newest one, which may not be read yet."""
        assert sequence.params is not None
        rows, unread = sequence.rows, sequence.unread
        return unread == 0 or (
            len(sequence.generated) + unread != sequence.params.max_tokens and not self.is_full(rows, unread)
        )

    def _admit(self, level: Priority) -> None:
        for sequence in sorted((s for s in self.waiting if s.priority is level), key=lambda s: s.place):
            if not self._make_room(sequence):
                break
            keys = sequence.rows.keys
            try:
                # The last row of a prompt is always computed: its logits are needed.
                table = self._open(keys[:-1] if sequence.params is not None else keys, level)
            except Exception as error:  # noqa: BLE001 - whatever a copy raises is this sequence's alone
                self.finish(sequence, None, error)
                continue
            sequence.table = table
            if self.slots:
                sequence.rewind()
            sequence.status = Status.RUNNING
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if sequence.computed < sequence.rows.masked_until:
                self.finish(sequence, None, MaskedRowsEvictedError("masked rows were evicted"))
                continue
            if sequence.admitted == 0.0:
                sequence.admitted = perf_counter()
                sequence.hit = prefix_hit(self.blocks, table, keys, sequence.origin)

    def _make_room(self, sequence: Sequence) -> bool:
        """Whether a sequence may run beside those that do.

        A person's may where there is room for all its rows and the next one, and for all of theirs and one more block
        each, or it would be preempted at once. Idle work waits where that helps. Alone it may always run: it ends where
        the context does.
        """
        if sequence.priority is Priority.IDLE:
            return len(self.running) < self.most_running
        while beside := [s for s in self.running if s.priority is Priority.PERSON]:
            if len(beside) >= self.most_running:
                return False
            needed = self.blocks.needs(sequence.rows.keys, len(sequence.rows) + 1)
            for other in beside:
                held = len(other.table.blocks) - other.table.first if other.table is not None else 0
                needed += max(self.blocks.most_held(len(other.rows)) + 1 - held, 0)
            if needed <= self.blocks.room():
                return True
            if not self._idle_work:
                return False
            self.preempt(self._idle_work[-1])
        return True

    def _open(self, keys: list[Key], level: Priority) -> BlockTable:
        """Open what is there of `keys`. What idle work leaves no room for in the cache makes that work wait."""
        while True:
            table = self.blocks.open(keys, level is Priority.IDLE)
            others = self._idle_work
            if level is Priority.IDLE or not others or table.length >= self.blocks.match(keys):
                return table
            self.blocks.close(table)
            self.preempt(others[-1])

    def _reserve(self, sequence: Sequence, rows: int) -> bool:
        """Make room; on the way others may lose their blocks, or `sequence` itself may end or have to wait."""
        if sequence.table is None:  # it was preempted for an older one
            return False
        while True:
            try:
                self.reserve(sequence.table, rows, sequence.priority is Priority.IDLE)
                return True
            except OutOfBlocksError:
                alone = sequence.priority is Priority.IDLE or self.running == [sequence]
                last = max(self.running, key=lambda s: s.place)
                if sequence.unread and (alone or last is sequence):
                    return False  # its newest token is read first
                if alone:
                    self.finish(sequence, FinishReason.CONTEXT_FULL)
                    return False
                self.preempt(last)
                if last is sequence:
                    return False
            except Exception as error:  # noqa: BLE001 - as above
                self.finish(sequence, None, error)
                return False

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if self.idle_turn is sequence:
            self.idle_turn = None
        sequence.catch_up()
        if sequence.joined:
            self.leave(sequence)
        if sequence.table is not None:
            sequence.reached = sequence.table.length
            self.blocks.close(sequence.table)
            sequence.table = None
