"""Guesses in a step: which chunks get some, and what becomes of them.

    step     | the newest row, and rows of guesses g1 g2 g3, in one span
    after it | token drawn = g1: its row counts | drawn = g2: counts | drawn = x: x it is, and g3 is forgotten

Each token is drawn from the logits of its own row, with its own random number, penalties and constraint, as it would
be without guesses. A row counts, and can be found by others, when its token was drawn; what was not is beyond the end
of the block table, and the next step writes over it. Guesses take free blocks only: nobody is evicted for them.

On a GPU sequences decode in slots, and the host is a step behind. Where what may come next pays as far as the host
knows, it reads the tokens that it has not, looks again, and waits for the step that checks the guesses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from engine.execute.cuda.decode_runner import ROWS, DecodeRunner
from engine.execute.runner import Runner
from engine.schedule.scheduler import Chunk, Scheduler
from engine.schedule.sequence import Priority, Sequence, Status
from engine.speculation.pace import MOST_ROWS, Balance, Pace
from engine.speculation.suffixes import NOTHING, Guess
from engine.speculation.texts import Text, Texts

AGAIN_IN_SLOTS = 256
"""As `AGAIN`, where a step of one row is measured beside the next one: the host waits for a step that has guesses."""


@dataclass(slots=True)
class Guessing:
    """What is known of a sequence that is answered."""

    text: Text
    balance: Balance = field(default_factory=Balance)
    guess: Guess = NOTHING
    """The latest, as long as it was offered."""
    hoped: Guess = NOTHING
    """The one that the step waited for, while tokens were unread."""

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
        self._begin([chunk.sequence for chunk in chunks])
        if not all(_may_guess(chunk) for chunk in chunks):
            return chunks
        guesses = self._guesses([chunk.sequence for chunk in chunks])
        return [replace(chunk, guesses=found) for chunk, found in zip(chunks, guesses, strict=True)]

    def hopes(self, sequences: list[Sequence]) -> bool:
        """Whether guesses may pay in the next step of these in their slots, some of whose tokens may be unread."""
        self._begin(sequences)
        return all(_may_guess_in_slot(sequence) for sequence in sequences) and any(self._guesses(sequences))

    def spans(self, sequences: list[Sequence]) -> list[tuple[Sequence, tuple[int, ...]]]:
        """The same once all tokens are read: each with guesses where they pay, and room for their rows."""
        return list(zip(sequences, self._guesses(sequences), strict=True))

    def waited(self, sequences: list[Sequence], seconds: float) -> None:
        """There was hope, but not once all tokens were read: the next step of these began so much later."""
        for sequence in sequences:
            known, unit = self._known.get(sequence), self.pace.costs.unit_s
            if known is not None and known.hoped.tokens and unit:
                self.pace.acceptance.saw(known.hoped, 1, 0)
                known.balance.saw(-seconds / unit / len(sequences))

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

    def saw(self, checked: list[tuple[Sequence, int, int]], seconds: float) -> None:
        """A step in which just these decoded took so long: of each how many guesses it had, and how many held."""
        costs = self.pace.costs
        rows = sum(1 + guesses for _, guesses, _ in checked)
        plain, guessing = costs.of(min(len(checked), MOST_ROWS)), sum(bool(each) for _, each, _ in checked)
        for sequence, guesses, held in checked:
            known = self._known.get(sequence)
            if not guesses or known is None or not costs.unit_s:
                continue
            self.pace.acceptance.saw(known.guess, guesses, held)
            saved = held * plain - (min(seconds / costs.unit_s, rows) - plain) / guessing
            known.balance.saw(saved)
            sequence.saved_s += saved * costs.unit_s
        costs.saw(rows, seconds)

    def _begin(self, sequences: list[Sequence]) -> None:
        self._forget()
        self.pace.turn_to(sum(sequence.computed for sequence in sequences))

    def _guesses(self, sequences: list[Sequence]) -> list[tuple[int, ...]]:
        """For each the guesses that pay. There is room for their rows, unless tokens before them are unread."""
        rows, tokens, found = len(sequences), float(len(sequences)), list[tuple[int, ...]]()
        for sequence in sequences:
            guesses = self._guess(sequence, rows, tokens) if rows < MOST_ROWS else ()
            rows += len(guesses)
            if guesses:
                right = self.pace.acceptance.of(self._known[sequence].guess)
                tokens += sum(right ** (n + 1) for n in range(len(guesses)))
            found.append(guesses)
        return found

    def _guess(self, sequence: Sequence, rows: int, tokens: float) -> tuple[int, ...]:
        known, unread = self._known.get(sequence), sequence.unread
        if known is None:
            text = self.texts.take(sequence.client, sequence.rows.token_ids)
            known = self._known[sequence] = Guessing(text)
        known.follow(sequence)
        most = min(unread + MOST_ROWS - rows, self._room(sequence))
        if most < 1:
            return ()
        known.guess = self.texts.guess(known.text, most)
        count = self.pace.count(known.guess, rows, tokens, known.balance, len(sequence.generated), unread)
        known.hoped = known.guess if unread and count else NOTHING
        return known.guess.tokens[unread : unread + (count if unread else self._reserve(sequence, count))]

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


def make_speculating(
    scheduler: Scheduler, runner: Runner, decode_runner: DecodeRunner[Sequence] | None
) -> Speculating | None:
    """None: what decodes here has one row of a sequence in a step."""
    if decode_runner is None:
        return Speculating(scheduler) if runner.checks_guesses else None
    if not decode_runner.checks_guesses:
        return None
    return Speculating(
        scheduler, Pace(sizes=tuple(rows for rows in ROWS if rows <= MOST_ROWS), again=AGAIN_IN_SLOTS)
    )


def how_speculated(guesses: bool, device: str) -> str:
    """What a person is told: how tokens are guessed, or why none are."""
    if guesses:
        return "suffix matching"
    if device == "cuda":
        return "off: only the fused kernels check several rows of an answer at once"
    return "off: only the native kernels check several rows of an answer at once"


def _may_guess(chunk: Chunk) -> bool:
    """The chunk is the next row of an answer that a person waits for, and wants guesses."""
    return chunk.count == 1 and chunk.samples and chunk.sequence.decodes and _wants_guesses(chunk.sequence)


def _may_guess_in_slot(sequence: Sequence) -> bool:
    """The same of a sequence in a slot, which has no constraint: masks are of one token a step there."""
    return sequence.guide is None and not sequence.known and _wants_guesses(sequence)


def _wants_guesses(sequence: Sequence) -> bool:
    params = sequence.params
    return sequence.priority is Priority.PERSON and params is not None and params.speculation != "off"


def _comes(sequence: Sequence, guess: int) -> bool:
    """Whether the next row to compute is of this token, and still wanted."""
    computed = sequence.computed
    return (
        sequence.status is Status.RUNNING
        and not sequence.cancelled
        and computed < len(sequence.rows)
        and sequence.rows.token_ids[computed] == guess
    )
