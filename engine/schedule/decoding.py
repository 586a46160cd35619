"""The sequences in the slots of a decode runner, with the host one step behind.

    device   | step i: tokens i-1 -> tokens i | a chunk of a prompt | step i+1: tokens i -> tokens i+1 | ...
    host     | launch i+1, wait for tokens i | their text, their events; enqueue a chunk; launch i+2 ...

The device never waits for the host, and a sequence that joins or leaves delays no other. If a token turns out to be the
last of its sequence, the step after it has already been launched, and its token is discarded.

What a constrained sequence may draw depends on the token before. If a step has such a sequence, its draws are enqueued
separately: while the device computes the logits of step i+1, which takes far longer, the host reads tokens i and writes
the masks. So the device does not wait here either.

    device   | logits i+1: tokens i -> ...                     | draws: tokens i+1 | logits i+2 ...
    host     | wait for tokens i, masks; enqueue the draws     | their text, their events; launch i+2 ...
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat

from torch import Tensor

from engine.execute.cuda.decode_runner import DecodeRunner
from engine.sampling.sampler import SampledToken
from engine.schedule.answers import Answers
from engine.schedule.ending import Ending
from engine.schedule.forced_tokens import FEWEST_FORCED
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class Decoding:
    """The sequences in slots, and the tokens that are not read yet. Everything here belongs to the loop thread.

    A step in flight for a sequence that has left still writes its row to a block that may belong to another sequence by
    then. That row lies after the committed rows, so it is never read, and the new owner of the block writes to it in a
    later command of the same stream. So blocks can be freed at once.
    """

    runner: DecodeRunner[Sequence]
    scheduler: Scheduler
    answers: Answers
    ending: Ending
    joined: set[Sequence] = field(default_factory=set)
    in_flight: deque[set[Sequence]] = field(default_factory=deque)
    """For each `join` and `launch` that was not read, oldest first, the sequences that still want its tokens."""
    undrawn: set[Sequence] | None = None
    """The same for a step that was launched but whose draws are not enqueued yet."""
    behind: int = 0
    """How many of the newest entries in flight came after the last `launch`."""
    _guided: dict[Sequence, None] = field(default_factory=dict)
    """Constrained sequences whose tokens were just read, in reading order."""

    def join(self, sequence: Sequence, logits: Tensor | None) -> None:
        """Decode `sequence` from now on, if no other comes before it. All its rows are computed; without `logits`
        [vocab], all except the last one."""
        # Idle work has a slot, or had one before a person waited for it.
        if len(self.joined) == self.runner.capacity:
            self.scheduler.preempt(max(*self.joined, sequence, key=lambda s: (s.priority, s.place)))
        if sequence.status is not SequenceStatus.RUNNING:
            return
        self.runner.join(sequence, logits)
        sequence.joined, sequence.unread = True, int(logits is not None)
        self.joined.add(sequence)
        if logits is not None:
            self.in_flight.append({sequence})
            self.behind += 1

    def launch(self, sequences: list[Sequence]) -> bool:
        """Enqueue a step of these. Return True if its draws wait for the tokens before; then `draw` enqueues them."""
        self.undrawn, self.behind = None, 0
        waits, wanted = self.runner.launch(sequences), set(sequences)
        if waits:
            self.undrawn = wanted
        else:
            self.in_flight.append(wanted)
        for sequence in sequences:
            sequence.unread += 1
            if sequence.unread == 1:
                self._commit(sequence)
        return waits

    def draw(self) -> None:
        """Enqueue the draws of the launched step once the tokens before are read."""
        self._read(1)

    def read(self, ahead: int) -> None:
        """Wait for tokens and take them, until only the newest `ahead` in flight are left. An error ends all sequences
        in slots."""
        if self.in_flight:
            with self.ending.of(lambda: [*self.joined]):
                self._read(ahead)

    def _read(self, ahead: int) -> None:
        before: list[tuple[Sequence, SampledToken]] = []
        while len(self.in_flight) + (self.undrawn is not None) > ahead:
            wanted = self.in_flight.popleft()
            self.behind = min(self.behind, len(self.in_flight))
            drawn = [(sequence, token) for sequence, token in self.runner.read() if sequence in wanted]
            if self.undrawn is not None:
                before += drawn
            else:
                self._take_all(drawn)
        if self.undrawn is not None:
            self._draw(before)
            self._take_all(before)

    def _take_all(self, drawn: list[tuple[Sequence, SampledToken]]) -> None:
        for sequence, token in drawn:
            if sequence.joined:
                sequence.unread -= 1
                self._take(sequence, token)
                self._commit(sequence)

    def _take(self, sequence: Sequence, drawn: SampledToken) -> None:
        try:
            if sequence.known:
                self._take_again(sequence, drawn.token_id)
            else:
                self.answers.take(sequence, drawn)
            if sequence.guide is not None:
                self._guided[sequence] = None
        except Exception as error:  # noqa: BLE001 - the other sequences still get their tokens
            self._fail(sequence, error)

    def _take_again(self, sequence: Sequence, token_id: int) -> None:
        """Take a token that was reported before. If another one is drawn now, leave the slot: the next step then gets
        the earlier one."""
        known = sequence.known.pop(0)
        sequence.generated.append(known)
        sequence.rows.append(known)
        if known != token_id:
            sequence.unread = 0  # the step in flight has the row of another token
            self.leave(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self.scheduler.finish(sequence, None, error)

    def _draw(self, drawn: list[tuple[Sequence, SampledToken]]) -> None:
        """Enqueue the draws of the launched step. `drawn` has the newest tokens of some of its sequences; all tokens of
        the others are known."""
        assert self.undrawn is not None
        newest = {sequence: token.token_id for sequence, token in drawn}
        for sequence in list(self.undrawn):
            try:
                self.runner.guide(sequence, newest.get(sequence))
            except Exception as error:  # noqa: BLE001 - the error concerns this sequence alone
                self._fail(sequence, error)
        self.runner.draw()
        self.in_flight.append(self.undrawn)
        self.undrawn = None

    def check_guesses(self, spans: list[tuple[Sequence, tuple[int, ...]]]) -> list[tuple[Sequence, int, int]]:
        """Run a step of each sequence's newest token and the guesses after it, and take the tokens drawn.

        Nothing is in flight before or after it. Return, for each of the sequences that can continue, how many guesses
        it had and how many were right.
        """
        assert not self.in_flight
        assert self.undrawn is None
        drawn, had = self.runner.check(spans, self._fail), dict(spans)
        for sequence, tokens in drawn:
            for token, guess in zip(tokens, chain(had[sequence], repeat(-1)), strict=False):
                if not sequence.joined:
                    break
                sequence.expected = guess
                sequence.unread = 1  # the row of the newest token was computed, and its id is known
                self._commit(sequence)
                sequence.unread = 0
                self._take(sequence, token)
            if sequence.joined and sequence.table is not None:
                self.scheduler.blocks.trim(sequence.table)
        return [(sequence, len(had[sequence]), len(tokens) - 1) for sequence, tokens in drawn]

    def jump_ahead(self, jumps: bool) -> None:
        """Have sequences leave their slots and take forced tokens, if `jumps`, where that saves far more steps than it
        costs the others."""
        guided, self._guided = self._guided, {}
        for sequence in guided:
            if jumps and sequence.joined:
                with self.ending.of(lambda: [sequence]):  # noqa: B023 - it is called here
                    self.answers.jump(sequence, FEWEST_FORCED * len(self.joined))

    def leave(self, sequence: Sequence) -> None:
        """Release the slot of `sequence`; its tokens that were not read are discarded.

        If the row of its last token is being computed, the states of recurrent layers have seen that row.
        """
        if sequence.table is not None and sequence.table.state is not None:
            self._commit(sequence)
        self.joined.remove(sequence)
        sequence.joined, sequence.unread = False, 0
        for wanted in [*self.in_flight, self.undrawn or set()]:
            wanted.discard(sequence)
        self.runner.leave(sequence)

    def _commit(self, sequence: Sequence) -> None:
        """Commit the rows of launched steps whose tokens the host knows, so that they can be found."""
        table, keys = sequence.table, sequence.rows.keys
        if table is not None:
            launched = keys[table.length : len(keys) + sequence.unread - 1]
            self.scheduler.blocks.commit(table, launched, repeat(sequence.origin))

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless sequences in slots are running, have one slot each, and wait for their tokens."""
        assert self.joined <= set(running), "a sequence that does not run has a slot"
        assert len(self.joined) <= self.runner.capacity, "there are more sequences than slots"
        assert all(s.joined == (s in self.joined) for s in running), "a sequence is not in the slot it thinks"
        for sequence in self.joined:
            waited = sum(sequence in wanted for wanted in self.in_flight)
            assert sequence.unread == waited <= 2, (
                f"{sequence.unread} tokens are unread, {waited} are waited for"
            )
        assert self.undrawn is None, "draws were not enqueued"
        assert all(wanted <= self.joined for wanted in self.in_flight), "somebody waits who has left"
