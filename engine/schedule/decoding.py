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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat

from torch import Tensor

from engine.cache.blocks import BlockManager
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.sampling.sampler import SampledToken
from engine.schedule.sequence import Sequence


@dataclass(slots=True)
class Decoding:
    """The sequences in slots, and the tokens that are not read yet. Everything here belongs to the loop thread.

    A step in flight for a sequence that has left still writes its row to a block that may belong to another sequence by
    then. That row lies after the committed rows, so it is never read, and the new owner of the block writes to it in a
    later command of the same stream. So blocks can be freed at once.
    """

    runner: DecodeRunner[Sequence]
    blocks: BlockManager
    joined: set[Sequence] = field(default_factory=set)
    in_flight: deque[set[Sequence]] = field(default_factory=deque)
    """For each `join` and `launch` that was not read, oldest first, the sequences that still want its tokens."""
    undrawn: set[Sequence] | None = None
    """The same for a step that was launched but whose draws are not enqueued yet."""
    behind: int = 0
    """How many of the newest entries in flight came after the last `launch`."""

    def join(self, sequence: Sequence, logits: Tensor | None) -> None:
        """Decode `sequence` from now on. All its rows are computed; without `logits`, all except the last one."""
        self.runner.join(sequence, logits)
        sequence.joined, sequence.unread = True, int(logits is not None)
        self.joined.add(sequence)
        if logits is not None:
            self.in_flight.append({sequence})
            self.behind += 1

    def launch(self, sequences: list[Sequence]) -> bool:
        """Enqueue a step of these. Return True if its draws wait for the tokens before; then `read` enqueues them."""
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

    def read(
        self,
        ahead: int,
        take: Callable[[Sequence, SampledToken], None],
        failed: Callable[[Sequence, Exception], None],
    ) -> None:
        """Wait for tokens and pass them to `take`, until only the newest `ahead` in flight are left.

        Draws that wait for these tokens are enqueued before that. `failed` gets the sequences that cannot continue.
        """
        before: list[tuple[Sequence, SampledToken]] = []
        while len(self.in_flight) + (self.undrawn is not None) > ahead:
            wanted = self.in_flight.popleft()
            self.behind = min(self.behind, len(self.in_flight))
            drawn = [(sequence, token) for sequence, token in self.runner.read() if sequence in wanted]
            if self.undrawn is not None:
                before += drawn
            else:
                self._take(drawn, take)
        if self.undrawn is not None:
            self._draw(before, failed)
            self._take(before, take)

    def _take(
        self, drawn: list[tuple[Sequence, SampledToken]], take: Callable[[Sequence, SampledToken], None]
    ) -> None:
        for sequence, token in drawn:
            if sequence.joined:
                sequence.unread -= 1
                take(sequence, token)
                self._commit(sequence)

    def _draw(
        self, drawn: list[tuple[Sequence, SampledToken]], failed: Callable[[Sequence, Exception], None]
    ) -> None:
        """Enqueue the draws of the launched step. `drawn` has the newest tokens of some of its sequences; all tokens of
        the others are known."""
        assert self.undrawn is not None
        newest = {sequence: token.token_id for sequence, token in drawn}
        for sequence in list(self.undrawn):
            try:
                self.runner.guide(sequence, newest.get(sequence))
            except Exception as error:  # noqa: BLE001 - the error concerns this sequence alone
                failed(sequence, error)
        self.runner.draw()
        self.in_flight.append(self.undrawn)
        self.undrawn = None

    def check_guesses(
        self,
        spans: list[tuple[Sequence, tuple[int, ...]]],
        take: Callable[[Sequence, SampledToken], None],
        failed: Callable[[Sequence, Exception], None],
    ) -> list[tuple[Sequence, int, int]]:
        """Run a step of each sequence's newest token and the guesses after it, and pass the tokens drawn to `take`;
        `failed` gets the sequences that cannot continue.

        Nothing is in flight before or after it. Return, for each of the other sequences, how many guesses it had and
        how many were right.
        """
        assert not self.in_flight
        assert self.undrawn is None
        drawn, had = self.runner.check(spans, failed), dict(spans)
        for sequence, tokens in drawn:
            for token, guess in zip(tokens, chain(had[sequence], repeat(-1)), strict=False):
                if not sequence.joined:
                    break
                sequence.expected = guess
                sequence.unread = 1  # the row of the newest token was computed, and its id is known
                self._commit(sequence)
                sequence.unread = 0
                take(sequence, token)
            if sequence.joined and sequence.table is not None:
                self.blocks.trim(sequence.table)
        return [(sequence, len(had[sequence]), len(tokens) - 1) for sequence, tokens in drawn]

    def leave(self, sequence: Sequence) -> None:
        """Release the slot of `sequence`; its tokens that were not read are discarded."""
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
            self.blocks.commit(table, launched, repeat(sequence.origin))

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
