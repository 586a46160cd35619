"""The sequences in the slots of a decode runner; the host looks on one step behind.

    device   | step i: tokens i-1 -> tokens i | a chunk of a prompt | step i+1: tokens i -> tokens i+1 | ...
    host     | launch i+1, wait for tokens i | their text, their events; enqueue a chunk; launch i+2 ...

The device never waits for the host, and a sequence that joins or leaves holds up nobody. Where a token turns out to be
the last of its sequence, the one after was launched already and is thrown away.

What a constrained sequence may draw depends on its token before. Where there is one in the step, the draws are enqueued
apart: while the device computes the logits of step i+1, which takes far longer, the host reads tokens i and writes the
masks. So nobody waits here either.

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
from engine.sampling.sampler import Drawn
from engine.schedule.sequence import Sequence


@dataclass(slots=True)
class Decoding:
    """Who is in a slot, and which tokens are not read. Everything here belongs to the loop thread.

    A step that is in flight for a sequence that has left goes on writing its row to a block that may be somebody
    else's by now. It lies beyond the rows that were committed, so nobody reads it; and whoever gets the block writes
    to it in a later command of the same stream, after it. So blocks are freed at once.
    """

    runner: DecodeRunner[Sequence]
    blocks: BlockManager
    joined: set[Sequence] = field(default_factory=set)
    in_flight: deque[set[Sequence]] = field(default_factory=deque)
    """For each `join` and `launch` that was not read, oldest first, the sequences that still want its tokens."""
    undrawn: set[Sequence] | None = None
    """The same for a step that was launched, and whose draws are not enqueued yet."""
    behind: int = 0
    """How many of the newest of those in flight came after the last `launch`."""

    def join(self, sequence: Sequence, logits: Tensor | None) -> None:
        """Decode `sequence` from now on, all of whose rows are computed; without logits, all but the last one."""
        self.runner.join(sequence, logits)
        sequence.joined, sequence.unread = True, int(logits is not None)
        self.joined.add(sequence)
        if logits is not None:
            self.in_flight.append({sequence})
            self.behind += 1

    def launch(self, sequences: list[Sequence]) -> bool:
        """Enqueue a step of these. True: its draws wait for the tokens before; `read` enqueues them."""
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
        take: Callable[[Sequence, Drawn], None],
        failed: Callable[[Sequence, Exception], None],
    ) -> None:
        """Wait for tokens and have `take` take them, until the newest `ahead` of what is in flight are left.

        Draws that wait for these tokens are enqueued before they are taken; `failed` gets who cannot go on.
        """
        before: list[tuple[Sequence, Drawn]] = []
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

    def _take(self, drawn: list[tuple[Sequence, Drawn]], take: Callable[[Sequence, Drawn], None]) -> None:
        for sequence, token in drawn:
            if sequence.joined:
                sequence.unread -= 1
                take(sequence, token)
                self._commit(sequence)

    def _draw(
        self, drawn: list[tuple[Sequence, Drawn]], failed: Callable[[Sequence, Exception], None]
    ) -> None:
        """Enqueue the draws of the step that was launched. Of its sequences these have drawn before; all tokens of the
        others are known."""
        assert self.undrawn is not None
        newest = {sequence: token.token_id for sequence, token in drawn}
        for sequence in list(self.undrawn):
            try:
                self.runner.guide(sequence, newest.get(sequence))
            except Exception as error:  # noqa: BLE001 - it is this sequence's alone
                failed(sequence, error)
        self.runner.draw()
        self.in_flight.append(self.undrawn)
        self.undrawn = None

    def check_guesses(
        self,
        spans: list[tuple[Sequence, tuple[int, ...]]],
        take: Callable[[Sequence, Drawn], None],
        failed: Callable[[Sequence, Exception], None],
    ) -> list[tuple[Sequence, int, int]]:
        """Do a step of the newest token of each and guesses of what follows it, and have `take` take what was drawn;
        `failed` gets who cannot go on.

        Nothing is in flight before and after it. Returns of each of the others how many guesses it had, and how many
        held.
        """
        assert not self.in_flight
        assert self.undrawn is None
        drawn, had = self.runner.check(spans, failed), dict(spans)
        for sequence, tokens in drawn:
            for token, guess in zip(tokens, chain(had[sequence], repeat(-1)), strict=False):
                if not sequence.joined:
                    break
                sequence.expected = guess
                sequence.unread = 1  # the row of the newest token was computed, and its number is known
                self._commit(sequence)
                sequence.unread = 0
                take(sequence, token)
            if sequence.joined and sequence.table is not None:
                self.blocks.trim(sequence.table)
        return [(sequence, len(had[sequence]), len(tokens) - 1) for sequence, tokens in drawn]

    def leave(self, sequence: Sequence) -> None:
        """Give the slot of `sequence` back; its tokens that were not read are thrown away."""
        self.joined.remove(sequence)
        sequence.joined, sequence.unread = False, 0
        for wanted in [*self.in_flight, self.undrawn or set()]:
            wanted.discard(sequence)
        self.runner.leave(sequence)

    def _commit(self, sequence: Sequence) -> None:
        """The rows whose step was launched can be found as soon as the host knows which tokens they are of."""
        table, keys = sequence.table, sequence.rows.keys
        if table is not None:
            launched = keys[table.length : len(keys) + sequence.unread - 1]
            self.blocks.commit(table, launched, repeat(sequence.origin))

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless everybody in a slot is running, has one slot, and is waited for rightly."""
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
