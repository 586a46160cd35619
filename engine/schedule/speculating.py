"""Guesses in a step: which chunks get them, and how they are checked.

    step     | the newest row, and rows of guesses g1 g2 g3, in one span
    after it | token drawn = g1: its row counts | drawn = g2: counts | drawn = x: x is taken, and g3 is dropped

Each token is drawn from the logits of its own row, with its own random number, penalties and constraint, as it would
be without guesses. A row counts, and other sequences can find it, once its token is drawn. Other rows lie beyond the
end of the block table, and the next step overwrites them. Guesses take free blocks only: they evict nothing.

On a GPU sequences decode in slots, and the host is a step behind. If guesses seem to pay as far as the host knows, it
reads the unread tokens, guesses again, and waits for the step that checks the guesses. A draft model is asked once all
tokens are read.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from engine.execute.cuda.decode_runner import ROWS, DecodeRunner
from engine.execute.faults import first_line
from engine.execute.runner import Runner
from engine.sampling.sampler import sample
from engine.schedule.forced_tokens import is_to_jump, permitted
from engine.schedule.scheduler import PromptChunk, Scheduler
from engine.schedule.sequence import Priority, Sequence, SequenceStatus
from engine.speculation.cost_model import MOST_ROWS, Balance, CostModel
from engine.speculation.sources import NOTHING, DraftRequest, DraftSource, Drawing, Guess
from engine.speculation.texts import ConversationText, Texts

T = TypeVar("T")

AGAIN_IN_SLOTS = 256
"""`AGAIN` for slots. There, plain steps overlap, but the host waits for a step that has guesses."""


MOST_READING = 16
"""The most time, in steps of one row, that a draft model may spend reading a text; the rest is read in idle time."""
DRAFTS = Guess((-1,))
"""Stands for the guesses of a draft model while tokens that it needs are unread."""


@dataclass(slots=True)
class Guessing:
    """The state of guessing for a running sequence."""

    text: ConversationText
    balance: Balance = field(default_factory=Balance)
    guess: Guess = NOTHING
    """The latest guess, as long as it was offered."""
    tried: Guess = NOTHING
    """The guess that was checked last. When its step is known to have ended, there may already be a later one."""
    hoped: Guess = NOTHING
    """The guess that the step waited for while tokens were unread."""
    drafting_s: float = 0.0
    """The seconds that the draft model took for the guess."""
    may_draft: bool = False
    """Whether the draft model is worth asking once all tokens are read."""
    reading_s: float = 0.0
    """Seconds that the draft model spent reading the text without a guess."""

    def follow(self, sequence: Sequence) -> None:
        """Append the new tokens of `sequence` to the text."""
        known, tokens = len(self.text.path), sequence.rows.token_ids
        if known < len(tokens):
            self.text.go_on(tokens[known:])


@dataclass(slots=True)
class Speculating:
    """Offers guesses to decoding sequences, and learns what they were worth. Only the loop thread may use it."""

    scheduler: Scheduler
    pace: CostModel = field(default_factory=CostModel)
    texts: Texts = field(default_factory=Texts)
    drafts: DraftSource | None = None
    """The draft model, if any."""
    notes: tuple[str, ...] = ()
    """Why the draft model is no longer used, in one line."""
    drafting_s: float = 0.0
    """Seconds that the draft model took for the guesses of this step."""
    apart_s: float = 0.0
    """Seconds that this step waited for the draft model in all."""
    _known: dict[Sequence, Guessing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pace.draft = self.drafts.cost if self.drafts is not None else 0.0

    def offer(self, chunks: list[PromptChunk]) -> list[PromptChunk]:
        """Return the same chunks, with guesses where they pay. A step with a prompt in it gets none."""
        self._begin([chunk.sequence for chunk in chunks])
        if not all(_may_guess(chunk) for chunk in chunks):
            return chunks
        guesses = self._guesses([chunk.sequence for chunk in chunks])
        return [replace(chunk, guesses=found) for chunk, found in zip(chunks, guesses, strict=True)]

    def spans(self, sequences: list[Sequence]) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Return these sequences in slots, each with guesses where they pay, and reserve blocks for their rows.

        While tokens are unread, return guesses that pay if the unread tokens are as guessed; nothing is reserved yet.
        """
        self._begin(sequences)
        together = len(sequences)
        if not all(_may_guess_in_slot(sequence, together) for sequence in sequences):
            return [(sequence, ()) for sequence in sequences]
        return list(zip(sequences, self._guesses(sequences), strict=True))

    def waited(self, sequences: list[Sequence], seconds: float) -> None:
        """Record the cost of hoped-for guesses that did not pay once all tokens were read: the next step of `sequences`
        began `seconds` later."""
        each, unit = seconds / len(sequences), self.pace.costs.unit_s
        for sequence in sequences:
            known = self._known.get(sequence)
            if known is None or not unit:
                continue
            if known.drafting_s:
                self.pace.drafts.saw(-known.drafting_s / unit)
                sequence.saved_s -= known.drafting_s
                known.drafting_s = 0.0
            if known.hoped.tokens:
                if known.hoped is DRAFTS:
                    self.pace.drafts.saw(-each / unit)
                else:
                    self.pace.acceptance.saw(known.hoped, 1, 0)
                    known.balance.saw(-each / unit)
                sequence.saved_s -= each
                known.hoped = NOTHING

    def draw(
        self, chunk: PromptChunk, logits: list[Tensor], draw: Callable[[Sequence, Tensor], None]
    ) -> None:
        """Have `draw` draw the token after each row of `chunk`, as long as all guesses before it hold."""
        sequence, guesses = chunk.sequence, chunk.guesses
        held, sequence.expected = 0, next(iter(guesses), -1)
        draw(sequence, logits[0])
        while held < len(guesses) and _comes(sequence, guesses[held]):
            self.scheduler.commit(sequence, sequence.computed, 1)
            held += 1
            if sequence.pending == 0:
                sequence.expected = guesses[held] if held < len(guesses) else -1
                draw(sequence, logits[held])
        if guesses and sequence.table is not None:
            self.scheduler.blocks.trim(sequence.table)
        self.checked(sequence, len(guesses), held)

    def checked(self, sequence: Sequence, guesses: int, held: int) -> None:
        """Record that `held` of `guesses` guessed tokens of an answer held."""
        tally, known = self.scheduler.tally, self._known.get(sequence)
        sequence.guessed += guesses
        sequence.accepted += held
        tally.guessed_tokens += guesses
        tally.accepted_tokens += held
        if known is None:
            return
        known.hoped, known.tried = NOTHING, known.guess
        if known.tried.chances:
            sequence.drafted += guesses
            sequence.drafts_accepted += held

    def saw(self, checked: list[tuple[Sequence, int, int]], seconds: float) -> None:
        """Record the seconds of a step that only decoded. `checked` gives each sequence, its number of guesses,
        and how many held."""
        costs = self.pace.costs
        rows = sum(1 + guesses for _, guesses, _ in checked)
        plain, guessing = costs.of(min(len(checked), MOST_ROWS)), sum(bool(each) for _, each, _ in checked)
        for sequence, guesses, held in checked:
            known = self._known.get(sequence)
            if known is None or not costs.unit_s or not (guesses or known.drafting_s):
                continue
            self.pace.drafts.saw(-known.drafting_s / costs.unit_s)
            sequence.saved_s -= known.drafting_s
            known.drafting_s = 0.0  # the next step may be one without guesses
            if not guesses:
                continue
            self.pace.acceptance.saw(known.tried, guesses, held)
            saved = held * plain - (min(seconds / costs.unit_s, rows) - plain) / guessing
            (self.pace.drafts if known.tried.chances else known.balance).saw(saved)
            # A step in which no guess was right saved nothing, even if it was faster than most.
            sequence.saved_s += (saved if held else min(saved, 0.0)) * costs.unit_s
        costs.saw(rows, seconds, len(checked))

    def drafted(self, rows: int, seconds: float) -> None:
        """Record the seconds that a step of `rows` rows took the draft model."""
        self.pace.costs.drafted(rows, seconds)
        self.drafting_s += seconds

    def ended(self, sequence: Sequence) -> None:
        """Release a finished sequence. Its text is likely to continue, so the draft model may read it in idle time."""
        self._try(lambda drafts: drafts.end(sequence))
        if sequence.error is None and not sequence.cancelled:
            self._try(lambda drafts: drafts.wish(sequence.rows.token_ids))

    def while_idle(self) -> bool:
        """Have the draft model read for some milliseconds. Return whether it has more to read."""
        return bool(self._try(lambda drafts: drafts.while_idle()))

    def _begin(self, sequences: list[Sequence]) -> None:
        self._forget()
        self.apart_s = 0.0
        self.pace.turn_to(sum(sequence.computed for sequence in sequences))

    def _guesses(self, sequences: list[Sequence]) -> list[tuple[int, ...]]:
        """Return the guesses that pay for each sequence. Reserve blocks for their rows unless tokens are unread."""
        rows, tokens, found = len(sequences), float(len(sequences)), list[tuple[int, ...]]()
        if rows >= MOST_ROWS:
            return [()] * rows
        for sequence in sequences:
            self._look_up(sequence, MOST_ROWS - rows, rows)
        if sequences and self.drafts is not None and not self.pace.measures:
            if any(sequence.unread for sequence in sequences):
                self._hope_to_draft(sequences)
            else:
                self._draft(sequences)
        for sequence in sequences:
            guesses = self._guess(sequence, rows, tokens) if rows < MOST_ROWS else ()
            rows += len(guesses)
            if guesses:
                tokens += sum(self.pace.acceptance.hold(self._known[sequence].guess)[: len(guesses)])
            found.append(guesses)
        return found

    def _look_up(self, sequence: Sequence, most: int, together: int) -> None:
        """Look up in the texts what comes after all known tokens of a sequence, one of `together`."""
        known, params = self._known.get(sequence), sequence.params
        if known is None:
            text = self.texts.take(sequence.client, sequence.rows.token_ids)
            known = self._known[sequence] = Guessing(text)
        known.follow(sequence)
        known.guess, known.drafting_s, known.may_draft = NOTHING, 0.0, False
        most = min(sequence.unread + most, self._room(sequence))
        if most > 0 and params is not None and params.speculation != "draft":
            known.guess = _cut(sequence, self.texts.guess(known.text, most), together)

    def _draft(self, sequences: list[Sequence]) -> None:
        """Have the draft model guess where that is expected to gain more than the guesses from texts."""
        rows, tokens, pace = len(sequences), float(len(sequences)), self.pace
        share = _share(rows)
        answers, asked, least = list[Sequence](), list[DraftRequest](), list[float]()
        for sequence in sequences:
            known, params = self._known[sequence], sequence.params
            assert params is not None
            most = min(share, self._room(sequence))
            if most > 0 and params.speculation != "suffix" and self._may_read(known):
                answers.append(sequence)
                asked.append(_asked(sequence, most))
                least.append(pace.best(known.guess, rows, tokens, known.balance, len(sequence.generated))[0])

        def goes_on(at: int, guess: Guess, texts: int) -> bool:
            return pace.drafts_more(guess, rows, tokens, asked[at].most, texts, least[at])

        if not any(goes_on(at, NOTHING, len(asked)) for at in range(len(asked))):
            pace.relax()
            return
        self.drafting_s = 0.0
        began = perf_counter()
        guesses = self._try(lambda drafts: drafts.guess(asked, goes_on, self.drafted)) or []
        self.apart_s = perf_counter() - began
        reading_s = self.apart_s - self.drafting_s
        for sequence, guess, before in zip(answers, guesses, least, strict=False):
            known, guess = self._known[sequence], _cut(sequence, guess, rows)
            known.drafting_s = self.drafting_s / len(asked)
            sequence.saved_s -= reading_s / len(asked)
            known.reading_s += 0.0 if guess.tokens else reading_s / len(asked)
            if pace.best(guess, rows, tokens, pace.drafts, 0)[0] > before:
                known.guess = guess  # the time that drafting took is spent either way

    def _hope_to_draft(self, sequences: list[Sequence]) -> None:
        """Note for which of these sequences, with tokens unread, the draft model will be worth asking."""
        rows, tokens, pace, hope = len(sequences), float(len(sequences)), self.pace, False
        for sequence in sequences:
            known, params = self._known[sequence], sequence.params
            assert params is not None
            most = min(_share(rows), self._room(sequence) - sequence.unread)
            if most > 0 and params.speculation != "suffix" and self._may_read(known):
                said, unread = len(sequence.generated), sequence.unread
                least = pace.best(known.guess, rows, tokens, known.balance, said, unread)[0]
                known.may_draft = pace.drafts_more(NOTHING, rows, tokens, most, rows, least)
                hope = hope or known.may_draft
        if not hope:
            pace.relax()

    def _may_read(self, known: Guessing) -> bool:
        """Return whether the draft model has read the text or may go on reading it."""
        return known.reading_s <= MOST_READING * (self.pace.costs.unit_s or known.reading_s)

    def _try(self, function: Callable[[DraftSource], T]) -> T | None:
        """Call `function` with the draft model. If it fails, stop using the draft model."""
        if self.drafts is None:
            return None
        try:
            return function(self.drafts)
        except Exception as error:  # noqa: BLE001 - whatever it is, answers go on without the draft model
            why = first_line(error)
            self.notes = (f"The {self.drafts.told} is no longer used, because it failed: {why}.",)
            self.drafts = None
        return None

    def _guess(self, sequence: Sequence, rows: int, tokens: float) -> tuple[int, ...]:
        known, unread = self._known[sequence], sequence.unread
        balance = self.pace.drafts if known.guess.chances else known.balance
        unit = self.pace.costs.unit_s
        spent = known.drafting_s / unit if unit else 0.0
        count = self.pace.count(known.guess, rows, tokens, balance, len(sequence.generated), unread, spent)
        if unread:
            known.hoped = known.guess if count else DRAFTS if known.may_draft else NOTHING
            if known.hoped is DRAFTS:
                return DRAFTS.tokens
        return known.guess.tokens[unread : unread + (count if unread else self._reserve(sequence, count))]

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens may come after the next one."""
        params, rows, scheduler = sequence.params, sequence.rows, self.scheduler
        assert params is not None
        left = scheduler.context_length - len(rows)
        left = min(left, scheduler.max_positions - rows.next_position)
        if params.max_tokens is not None:
            left = min(left, params.max_tokens - len(sequence.generated))
        return left - 1

    def _reserve(self, sequence: Sequence, count: int) -> int:
        """Reserve the row of the newest token and `count` more, or as many more as fit into free blocks. Return how
        many that are."""
        table, blocks = sequence.table, self.scheduler.blocks
        assert table is not None
        if count:
            most = (len(table.blocks) + blocks.num_free) * blocks.block_size - table.length - 1
            count = max(min(count, most), 0)
            blocks.reserve(table, 1 + count)
        return count

    def _forget(self) -> None:
        """Give back the texts of finished sequences, for the next turn."""
        for sequence in [one for one in self._known if one.status is SequenceStatus.FINISHED]:
            known = self._known.pop(sequence)
            known.follow(sequence)
            self.texts.give_back(known.text)


def make_speculating(
    scheduler: Scheduler,
    runner: Runner,
    decode_runner: DecodeRunner[Sequence] | None,
    drafts: DraftSource | None,
) -> Speculating | None:
    """Return None if decoding here computes only one row per sequence in a step."""
    if decode_runner is None:
        return Speculating(scheduler, drafts=drafts) if runner.checks_guesses else None
    if not decode_runner.checks_guesses:
        return None
    sizes = tuple(rows for rows in ROWS if rows <= MOST_ROWS)
    return Speculating(scheduler, CostModel(sizes=sizes, again=AGAIN_IN_SLOTS), drafts=drafts)


def how_speculated(speculating: Speculating | None, device: str) -> str:
    """Describe for the user how tokens are guessed, or why none are."""
    if speculating is not None:
        drafts = speculating.drafts
        return "suffix matching" if drafts is None else f"suffix matching, {drafts.told}"
    if device == "cuda":
        return "off: only the fused kernels check several tokens of an answer at once"
    return "off: only the native kernels check several tokens of an answer at once"


def _may_guess(chunk: PromptChunk) -> bool:
    """Return whether the chunk is the next row of an answer that a person waits for and that wants guesses."""
    return chunk.count == 1 and chunk.samples and chunk.sequence.decodes and _wants_guesses(chunk.sequence)


def _may_guess_in_slot(sequence: Sequence, together: int) -> bool:
    """Return the same for a sequence in a slot, one of `together`."""
    if sequence.known or not _wants_guesses(sequence):
        return False
    return sequence.guide is None or not is_to_jump(sequence, together)


def _cut(sequence: Sequence, guess: Guess, together: int) -> Guess:
    """Cut a guess to the tokens that the constraint of the answer allows in a slot after all known tokens."""
    if sequence.guide is None or not sequence.joined:
        return guess  # elsewhere each token is drawn by the host, which knows the constraint
    count = permitted(sequence, guess.tokens, together)
    return guess._replace(tokens=guess.tokens[:count], chances=guess.chances[:count])


def _wants_guesses(sequence: Sequence) -> bool:
    params = sequence.params
    return sequence.priority is Priority.PERSON and params is not None and params.speculation != "off"


def _share(rows: int) -> int:
    """Return how many tokens may be drafted for each of `rows` sequences."""
    return -(-(MOST_ROWS - rows) // rows)


def _asked(sequence: Sequence, most: int) -> DraftRequest:
    assert sequence.params is not None
    how = Drawing(sequence.params, sequence.seed, len(sequence.generated)) if sequence.joined else None
    return DraftRequest(sequence, sequence.rows.token_ids, most, _drawing(sequence), how)


def _drawing(sequence: Sequence) -> Callable[[Tensor, Items[int]], int] | None:
    """Return how the next tokens of the answer are drawn, apart from its constraint; None if that is unknown."""
    state = sequence.sampler
    if state is None:
        return None

    def draw(logits: Tensor, after: Items[int]) -> int:
        with state.after(after):
            return sample(logits, state)

    return draw


def _comes(sequence: Sequence, guess: int) -> bool:
    """Return whether the next row to compute is that of token `guess`, and is still wanted."""
    computed = sequence.computed
    return (
        sequence.status is SequenceStatus.RUNNING
        and not sequence.cancelled
        and computed < len(sequence.rows)
        and sequence.rows.token_ids[computed] == guess
    )
