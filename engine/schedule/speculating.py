"""Guesses in a step: which chunks get some, and what becomes of them.

    step     | the newest row, and rows of guesses g1 g2 g3, in one span
    after it | token drawn = g1: its row counts | drawn = g2: counts | drawn = x: x it is, and g3 is forgotten

Each token is drawn from the logits of its own row, with its own random number, penalties and constraint, as it would
be without guesses. A row counts, and can be found by others, when its token was drawn; what was not is beyond the end
of the block table, and the next step writes over it. Guesses take free blocks only: nobody is evicted for them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from engine.schedule.scheduler import Chunk, Scheduler
from engine.schedule.sequence import Priority, Sequence, Status
from engine.speculation.pace import MOST_ROWS, Balance, Pace
from engine.speculation.suffixes import NOTHING, Guess
from engine.speculation.texts import Text, Texts


@dataclass(slots=True)
class Guessing:
    """What is known of a sequence that is answered."""

    text: Text
    balance: Balance = field(default_factory=Balance)
    guess: Guess = NOTHING
    """The latest, as long as it was offered."""

    def follow(self, sequence: Sequence) -> None:
        """Know all its tokens."""
        known, tokens = len(self.text.path), sequence.rows.token_ids
        if known < len(tokens):
            self.text.go_on(tokens[known:])


@dataclass(slots=True)
class Speculating:
    """Offers guesses to decoding sequences, and learns from what they were worth. It belongs to the loop thread."""

    scheduler: Scheduler
    pace: Pace = field(default_factory=Pace)
    texts: Texts = field(default_factory=Texts)
    _known: dict[Sequence, Guessing] = field(default_factory=dict)

    def offer(self, chunks: list[Chunk]) -> list[Chunk]:
        """The same chunks, with guesses where they pay. A step with a prompt in it stays as it is."""
        self._forget()
        self.pace.turn_to(sum(chunk.start for chunk in chunks))
        asking = [chunk for chunk in chunks if _may_guess(chunk)]
        if len(asking) < len(chunks) or len(chunks) >= MOST_ROWS:
            return chunks
        rows, tokens, found = len(chunks), float(len(chunks)), list[Chunk]()
        for chunk in chunks:
            guesses = self._guess(chunk.sequence, rows, tokens)
            rows += len(guesses)
            if guesses:
                guessing = self._known[chunk.sequence]
                tokens += sum(self.pace.acceptance.of(guessing.guess) ** (n + 1) for n in range(len(guesses)))
            found.append(replace(chunk, guesses=guesses))
        return found

    def draw(self, chunk: Chunk, logits: list[Tensor], draw: Callable[[Sequence, Tensor], None]) -> None:
        """Have `draw` draw the token after each row of `chunk`, as long as those before it were guessed rightly."""
        sequence, guesses = chunk.sequence, chunk.guesses
        draw(sequence, logits[0])
        held = 0
        while held < len(guesses) and _comes(sequence, guesses[held]):
            self.scheduler.commit(sequence, sequence.computed, 1)
            held += 1
            if sequence.pending == 0:
                draw(sequence, logits[held])
        if guesses and sequence.table is not None:
            self.scheduler.blocks.trim(sequence.table)
        sequence.guessed += len(guesses)
        sequence.accepted += held

    def saw(self, chunks: list[Chunk], accepted: Iterable[int], seconds: float) -> None:
        """A step of these chunks, all of which decode, took so long; of the guesses of each so many held."""
        costs = self.pace.costs
        rows = sum(1 + len(chunk.guesses) for chunk in chunks)
        plain, guessing = costs.of(min(len(chunks), MOST_ROWS)), sum(bool(chunk.guesses) for chunk in chunks)
        for chunk, held in zip(chunks, accepted, strict=True):
            known = self._known.get(chunk.sequence)
            if not chunk.guesses or known is None or not costs.unit_s:
                continue
            self.pace.acceptance.saw(known.guess, len(chunk.guesses), held)
            saved = held * plain - (min(seconds / costs.unit_s, rows) - plain) / guessing
            known.balance.saw(saved)
            chunk.sequence.saved_s += saved * costs.unit_s
        costs.saw(rows, seconds)

    def _guess(self, sequence: Sequence, rows: int, tokens: float) -> tuple[int, ...]:
        known = self._known.get(sequence)
        if known is None:
            text = self.texts.take(sequence.client, sequence.rows.token_ids)
            known = self._known[sequence] = Guessing(text)
        known.follow(sequence)
        most = min(MOST_ROWS - rows, self._room(sequence))
        if most < 1:
            return ()
        known.guess = self.texts.guess(known.text, most)
        count = self.pace.count(known.guess, rows, tokens, known.balance, len(sequence.generated))
        return known.guess.tokens[: self._reserve(sequence, count)]

    def _room(self, sequence: Sequence) -> int:
        """How many tokens may come after the next one."""
        params, rows, scheduler = sequence.params, sequence.rows, self.scheduler
        assert params is not None
        left = scheduler.context_length - len(rows)
        left = min(left, scheduler.max_positions - rows.next_position)
        if params.max_tokens is not None:
            left = min(left, params.max_tokens - len(sequence.generated))
        return left - 1

    def _reserve(self, sequence: Sequence, count: int) -> int:
        """Make room for the row of the newest token and `count` more, or as many as fit into free blocks."""
        table, blocks = sequence.table, self.scheduler.blocks
        assert table is not None
        if count:
            most = (len(table.blocks) + blocks.num_free) * blocks.block_size - table.length - 1
            count = max(min(count, most), 0)
            blocks.reserve(table, 1 + count)
        return count

    def _forget(self) -> None:
        """Texts of sequences that have ended wait for the next turn."""
        for sequence in [one for one in self._known if one.status is Status.FINISHED]:
            known = self._known.pop(sequence)
            known.follow(sequence)
            self.texts.give_back(known.text)


def how_speculated(guesses: bool, device: str) -> str:
    """What a person is told: how tokens are guessed, or why none are."""
    if guesses:
        return "suffix matching"
    if device == "cuda":
        return "off: a step on a GPU takes one row of an answer"
    return "off: only the native kernels check several rows of an answer at once"


def _may_guess(chunk: Chunk) -> bool:
    """The chunk is the next row of an answer that a person waits for, and wants guesses."""
    sequence = chunk.sequence
    return (
        chunk.count == 1
        and chunk.samples
        and sequence.decodes
        and sequence.priority is Priority.PERSON
        and sequence.params is not None
        and sequence.params.speculation != "off"
    )


def _comes(sequence: Sequence, guess: int) -> bool:
    """Whether the next row to compute is of this token, and still wanted."""
    computed = sequence.computed
    return (
        sequence.status is Status.RUNNING
        and not sequence.cancelled
        and computed < len(sequence.rows)
        and sequence.rows.token_ids[computed] == guess
    )
