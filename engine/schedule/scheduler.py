"""Chooses the sequences that run in the next step, and how many of their rows."""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from math import inf
from sys import maxsize
from time import perf_counter

from engine.batch import Recorded, Span
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.live_state import StatePlan
from engine.cache.prefix_hit import prefix_hit
from engine.cache.rows import Rows
from engine.errors import EngineError
from engine.events import FinishReason
from engine.schedule.chunk_pace import FEWEST, PADDING, RowCost
from engine.schedule.metrics import Tally
from engine.schedule.prompt_logits import PromptLogits
from engine.schedule.sequence import Priority, Sequence, SequenceStatus
from engine.schedule.state_plan import state_plan


class MaskedRowsEvictedError(EngineError):
    """Rows computed with a think span in view were evicted; their turn has to be computed again."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows `start` to `start + count` of a sequence. With `samples`, its next token is drawn after them.

    The rows of `guesses` are then computed as well; they count as soon as exactly these tokens have been drawn.
    """

    sequence: Sequence
    start: int
    count: int
    guesses: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the end of the rows of a sequence that generates."""
        return self.sequence.params is not None and self.start + self.count == len(self.sequence.rows)

    @property
    def span(self) -> Span:
        """The span to compute. Rows of a continued answer count as rows of a prompt, unless the chunk is one row.

        A single row is a decode step.
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
            state.moves if (state := sequence.table.state) is not None else None,
        )


@dataclass(slots=True)
class Step:
    """The work of the next step: a decode step of the sequences in slots, and beside it a batch of chunks."""

    launched: list[Sequence] = field(default_factory=list)
    """Sequences with slots of a decode runner, and with room for the row of their newest token."""
    joining: list[Sequence] = field(default_factory=list)
    """Sequences that lack only the row of a token of their answer: they need a slot, and no chunk."""
    chunks: list[PromptChunk] = field(default_factory=list)
    known: list[PromptChunk] = field(default_factory=list)
    """Chunks without rows, of prompts whose logits are remembered."""

    @property
    def prompts(self) -> list[PromptChunk]:
        """The chunks that are not the next row of an answer."""
        return [chunk for chunk in self.chunks if not chunk.sequence.decodes]


@dataclass(slots=True)
class Scheduler:
    """Puts requests before idle work: idle work runs only while no request waits, in chunks short enough to give way.

    A sequence waits, runs (it holds a block table), is preempted if blocks run out, runs again, and finishes. Clients
    take turns; otherwise the first to come is served first (`Sequence.place`). A person's sequence runs once there is
    room for all its rows and the sequences before it run. In a step, the rows that decoding leaves go to prompts in the
    same order. A preempted sequence keeps its place, and no sequence is preempted for one behind it. So the oldest
    always progresses, and every sequence finishes.

    If blocks run out, idle work ends. A person's sequence first takes what idle work may take as well, then preempts
    idle work, then takes the cached blocks of the conversation in use beyond the sequence's own, and then preempts the
    running sequence that is last in the order. The rows of a preempted sequence stay in the cache or go to host memory.

    With a decode runner, sequences that decode have a slot in it (`Sequence.joined`). Without one, their rows are
    chunks like those of prompts.
    """

    blocks: BlockManager
    max_chunk: int
    """The most prefill rows in one step."""
    idle_chunk: int
    """The same for idle work; `IdlePace` adjusts it to how long a person may have to wait."""
    beside_chunk: tuple[int, float] = (maxsize, inf)
    """The most prefill rows beside decoding, and the most that they may cost; `ChunkPace` adjusts both to the delay
    allowed between the tokens of others."""
    row_cost: RowCost = field(default_factory=RowCost)
    recorded: Recorded = field(default_factory=Recorded)
    slots: int = 0
    """Slots of the decode runner; 0 without one."""
    leave: Callable[[Sequence], None] = lambda sequence: None
    """Called to release a sequence's slot."""
    context_length: int = maxsize
    max_positions: int = maxsize
    waiting: list[Sequence] = field(default_factory=list)
    """New and preempted sequences, in the order of their arrival."""
    running: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    """Sequences that the scheduler has ended since the engine last looked."""
    arrivals: Iterator[int] = field(default_factory=count)
    turn: int = 0
    """The latest turn that has begun to run: a new request waits behind at most one waiting request of each client."""
    tally: Tally = field(default_factory=Tally)
    logits: PromptLogits = field(default_factory=PromptLogits)
    idle_turn: Sequence | None = None
    """The sequence whose idle work the last step did; None: none."""

    @property
    def has_work(self) -> bool:
        """Whether there is something to run, or the end of a sequence to report."""
        return bool(self.waiting or self.running or self.finished)

    @property
    def most_running(self) -> int:
        """The most sequences that run at once: each needs a block, and a slot or a row of each step."""
        return min(self.slots or self.max_chunk, self.blocks.num_blocks)

    def is_full(self, rows: Rows, more: int = 0) -> bool:
        """Return whether the context has no room after `rows` and `more` further rows."""
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
        """End a sequence, whatever its state. Its written rows stay in the cache."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:  # its blocks are being read from disk, so it ends when it is added
            sequence.cancelled = True
            return
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        self.finished.append(sequence)

    def cancel_all(self) -> None:
        """Cancel every sequence: all end with the next step."""
        for sequence in [*self.waiting, *self.running]:
            sequence.cancelled = True

    def next_step(self) -> Step:
        """Choose the next step; empty if nothing can run. A sequence whose rows fail to copy ends with that error."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.cancelled:
                self.finish(sequence, FinishReason.CANCELLED)
        level = min((s.priority for s in [*self.waiting, *self.running]), default=Priority.IDLE)
        self._admit(level)
        self._catch_up(level)
        # Decoding goes first: another request's long prompt must not interrupt an answer.
        mine = sorted(
            (s for s in self.running if s.priority is level), key=lambda s: (not self._decodes(s), s.place)
        )
        step = Step()
        for sequence in mine:
            if sequence.joined and self._goes_on(sequence) and self._reserve(sequence, 1):
                step.launched.append(sequence)
        most = self.max_chunk if level is Priority.PERSON else min(self.idle_chunk, self.max_chunk)
        self._add_chunks(step, mine, most)
        # A reservation may have preempted an earlier choice.
        step.launched = [sequence for sequence in step.launched if sequence.joined]
        step.joining = [sequence for sequence in step.joining if sequence.status is SequenceStatus.RUNNING]
        step.chunks = [chunk for chunk in step.chunks if chunk.sequence.status is SequenceStatus.RUNNING]
        step.known = [chunk for chunk in step.known if chunk.sequence.status is SequenceStatus.RUNNING]
        return step

    def _catch_up(self, level: Priority) -> None:
        """Let idle work that runs again pick up the rows that others have computed in the meantime."""
        first = min(
            (s for s in self._idle_work if s.pending and not s.joined), key=lambda s: s.place, default=None
        )
        before, self.idle_turn = self.idle_turn, first if level is Priority.IDLE else None
        if self.idle_turn is None or first is None or first is before or first.generated:
            return
        if self.blocks.match(first.rows.keys[:-1], first.since) > first.computed:
            self.preempt(first)
            self._admit(level)

    def _comes(self, sequence: Sequence, chunks: list[PromptChunk]) -> bool:
        """Return whether one of `chunks` belongs to a sequence that will compute this sequence's next row as well."""
        upto = sequence.computed + 1
        keys = sequence.rows.keys[:upto]
        return any(chunk.sequence.rows.keys[:upto] == keys for chunk in chunks)

    def _add_chunks(self, step: Step, mine: list[Sequence], budget: int) -> None:
        """Give `budget` rows of the step to sequences without a slot, in order; prompts beside decoding get fewer."""
        beside = any(self._decodes(sequence) for sequence in mine)
        for sequence in mine:
            if sequence.joined or sequence.status is not SequenceStatus.RUNNING:
                continue
            if sequence.pending == 0 and sequence.logits is not None:
                step.known.append(PromptChunk(sequence, sequence.computed, 0))
                continue
            if sequence.pending == 0:  # nothing to generate, and everything is warm
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
            step.chunks.append(PromptChunk(sequence, sequence.computed, rows))
            if sequence.priority is Priority.PERSON:
                self.turn = max(self.turn, sequence.turn)
            budget -= rows

    def _beside(self, before: list[PromptChunk], sequence: Sequence, rows: int) -> int:
        """Return how many of `rows` rows of a prompt fit beside decoding, after the chunks `before`."""
        most, cost = self.beside_chunk
        taken, count = sum(chunk.count for chunk in before), len(before) + 1
        # A longer chunk is enqueued kernel by kernel, which takes the host longer than the device may take.
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
        """Note that the rows of the chunks are written, so that they can be found."""
        for chunk in step.chunks:
            self.commit(chunk.sequence, chunk.start, chunk.count)

    def commit(self, sequence: Sequence, start: int, count: int) -> None:
        """Note the same for rows `start` to `start + count` of a sequence, which follow its committed rows."""
        if sequence.table is not None:
            keys = sequence.rows.keys[start : start + count]
            self.blocks.commit(sequence.table, keys, repeat(sequence.origin))

    def reserve(
        self,
        table: BlockTable,
        rows: int,
        idle: bool = False,
        is_bare: bool = False,
        plan: StatePlan | None = None,
    ) -> None:
        """Make room for `rows` more rows in a table, preempting idle work if necessary, unless it is `idle` itself.

        With a `plan`, there is room for its states, too. `is_bare` and what is raised are as in `BlockManager.reserve`.
        """
        while True:
            others = [s for s in self._idle_work if s.table is not table]
            spares = idle or bool(others)
            try:
                self.blocks.reserve(table, rows, spares, is_bare)
                return None if plan is None else self.blocks.states.plan(table, replace(plan, idle=spares))
            except OutOfBlocksError:
                if idle or not others:
                    raise
                self.preempt(others[-1])

    def preempt(self, sequence: Sequence) -> None:
        """Make a running sequence wait until there is room for it again. Its written rows stay in the cache.

        Tokens that the host has not read are drawn again later. With a decode runner, so are tokens whose rows are
        lost: a row of an answer is always computed by a decode step, and the seed and the step determine its token.
        """
        self._release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.preemptions += 1
        self.tally.preemptions += sequence.priority is Priority.PERSON
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    @property
    def _idle_work(self) -> list[Sequence]:
        return [s for s in self.running if s.priority is Priority.IDLE]

    def _decodes(self, sequence: Sequence) -> bool:
        return sequence.joined or (not self.slots and sequence.decodes)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Return whether another token may follow the newest one, which may not have been read yet."""
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
            if sequence.params is not None and len(keys) == sequence.prompt_tokens:
                sequence.logits = self.logits.find(keys)
            try:
                table = self._open(sequence, level)
            except Exception as error:  # noqa: BLE001 - an error in copying concerns this sequence alone
                self.finish(sequence, None, error)
                continue
            sequence.table = table
            if table.length < len(keys):
                sequence.logits = None
            if self.slots:
                sequence.rewind()
            sequence.status = SequenceStatus.RUNNING
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if sequence.computed < sequence.rows.masked_until:
                self.finish(sequence, None, MaskedRowsEvictedError("masked rows were evicted"))
                continue
            if sequence.admitted == 0.0:
                sequence.admitted = perf_counter()
                sequence.hit = prefix_hit(self.blocks, table, keys, sequence.origin)

    def _make_room(self, sequence: Sequence) -> bool:
        """Return whether a sequence may run beside those that run.

        A person's may if there is room for all its rows and the next one, and for all rows of the others and one more
        block each; otherwise it would be preempted at once. Idle work is preempted if that helps. A sequence alone may
        always run; it ends when the context is full.
        """
        if sequence.priority is Priority.IDLE:
            return len(self.running) < self.most_running
        while beside := [s for s in self.running if s.priority is Priority.PERSON]:
            if len(beside) >= self.most_running:
                return False
            others = [(other.table, len(other.rows)) for other in beside if other.table is not None]
            if self.blocks.fits_beside(sequence.rows.keys, len(sequence.rows) + 1, others):
                return True
            if not self._idle_work:
                return False
            self.preempt(self._idle_work[-1])
        return True

    def _open(self, sequence: Sequence, level: Priority) -> BlockTable:
        """Open a table with what is cached of a sequence. Idle work that leaves no room for that is preempted."""
        keys, since = sequence.reusable, sequence.since
        while True:
            table = self.blocks.open(keys, level is Priority.IDLE, group_since=since)
            others = self._idle_work
            if level is Priority.IDLE or not others or table.length >= self.blocks.match(keys, since):
                return table
            self.blocks.close(table)
            self.preempt(others[-1])

    def _reserve(self, sequence: Sequence, rows: int) -> bool:
        """Make room, preempting others if necessary. Return False if there is none; `sequence` may then be ended or
        preempted."""
        if sequence.table is None:  # it was preempted for an older sequence
            return False
        while True:
            try:
                idle = sequence.priority is Priority.IDLE
                plan = state_plan(sequence, rows) if self.blocks.marks is not None else None
                self.reserve(sequence.table, rows, idle, plan=plan)
                return True
            except OutOfBlocksError:
                alone = sequence.priority is Priority.IDLE or self.running == [sequence]
                last = max(self.running, key=lambda s: s.place)
                if sequence.unread and (alone or last is sequence):
                    return False  # its newest token has to be read first
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
        if sequence.joined:
            self.leave(sequence)
        sequence.catch_up()
        if sequence.table is not None:
            sequence.reached = sequence.table.length
            self.blocks.close(sequence.table)
            sequence.table = None
