"""A draft model: a small one of the same tokenizer, whose likeliest next tokens are guesses for a large one.

It has a KV cache of its own, in which texts that begin alike share their rows, and a table for each sequence:

    rows     | read: tokens of the text   | ahead: rows of guesses | reserved
    table    0 ...                  length

A chain of guesses begins with the rows of the tokens drawn since the last chain. Rows of guesses that held are already
computed; rows of wrong guesses lie beyond the end of the table, and are overwritten.

The states of recurrent layers are those after the tokens of the text. Rows of guesses leave theirs in a slot of their
own, and those that held are read from the log.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from engine.batch import Span, StateMoves, StepBatch
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.offload import common_prefix
from engine.errors import EngineError
from engine.execute.runner import Runner
from engine.schedule.idle_pace import IdlePace
from engine.schedule.state_plan import BEFORE_ANSWER, answer_plan, reading_plan
from engine.speculation.cost_model import MOST_ROWS
from engine.speculation.sources import NOTHING, DraftRequest, GoesOn, Guess
from models.units import bytes_text

MOST_BEHIND = MOST_ROWS
"""If more tokens than this are missing, they are read first, some in each step, and nothing is guessed."""


@dataclass(slots=True, eq=False)
class ReadProgress:
    """How far a text has been read."""

    table: BlockTable
    ahead: list[int] = field(default_factory=list)
    """Tokens of the rows after those of the table."""

    @property
    def rows(self) -> int:
        """Number of rows written."""
        return self.table.length + len(self.ahead)


@dataclass(slots=True)
class Drafting:
    """Implements `Source`."""

    name: str
    runner: Runner
    blocks: BlockManager
    vocab_size: int
    """The number of tokens that both models know."""
    most_rows: int
    """The most rows of a text."""
    max_chunk: int
    """The most rows of a step that only reads."""
    draws: bool = True
    """Whether the draft model has logits for all tokens of the large one, so that tokens can be drawn from them."""
    nbytes: int = 0
    """Bytes of its weights and its KV cache."""
    cost: float = 0.0
    """The estimated time of one of its steps, in steps of the model that it guesses for."""
    guess_states: Sequence[int] | None = None
    """Of recurrent layers, the slots of the states after rows of guesses: one for each text that is guessed at a time.
    None: there are no such layers."""
    pace: IdlePace = field(default_factory=IdlePace)
    _readings: dict[Hashable, ReadProgress] = field(default_factory=dict)
    _wish: list[int] = field(default_factory=list)
    _wished: ReadProgress | None = None

    @property
    def told(self) -> str:
        return f"draft model {self.name} ({bytes_text(self.nbytes)})"

    @property
    def copied_bytes(self) -> int:
        return self.runner.copied_bytes

    def guess(
        self, asked: Sequence[DraftRequest], goes_on: GoesOn, saw: Callable[[int, float], None]
    ) -> list[Guess]:
        self._let_go()
        guesses = [NOTHING] * len(asked)
        going = self._all_caught_up(asked)
        spare = dict(zip(going, self.guess_states or (), strict=False))
        while going := {
            at: one
            for at, one in going.items()
            if goes_on(at, guesses[at], len(going))
            and self._plan(one, len(asked[at].tokens) - one.table.length)
        }:
            began = perf_counter()
            spans = [
                self._span(reading, asked[at].tokens, guesses[at], spare.get(at))
                for at, reading in going.items()
            ]
            logits = self.runner.run(StepBatch(tuple(spans)))
            for (at, reading), span, row in zip(going.items(), spans, logits, strict=True):
                self._wrote(reading, asked[at].tokens, span)
                guesses[at] = self._longer(asked[at], guesses[at], row)
            saw(sum(span.count for span in spans), perf_counter() - began)
        return guesses

    def end(self, whom: Hashable) -> None:
        if (reading := self._readings.pop(whom, None)) is not None:
            self.blocks.close(reading.table)

    def wish(self, tokens: Sequence[int]) -> None:
        self._let_go()
        if self._takes(tokens, 0):
            self._wish = list(tokens)

    def while_idle(self) -> bool:
        if not self._wish:
            return self.runner.while_idle()
        if self._wished is None:
            self._wished = ReadProgress(self.blocks.open(self._wish, idle=True))
        if not self._read(self._wished, self._wish, self.pace.rows, idle=True):
            self._let_go()
        return True

    def _all_caught_up(self, asked: Sequence[DraftRequest]) -> dict[int, ReadProgress]:
        """Return what `_caught_up` does for each of these texts, by its number; of recurrent layers, for as many as
        there are states for their guesses."""
        found = [
            (at, reading) for at, one in enumerate(asked) if (reading := self._caught_up(one)) is not None
        ]
        return dict(found if self.guess_states is None else found[: len(self.guess_states)])

    def _caught_up(self, asked: DraftRequest) -> ReadProgress | None:
        """Return the reading of a text that is nearly complete and has room for guesses. Otherwise read more of it if
        possible, and return None."""
        tokens, reading = asked.tokens, self._readings.get(asked.whom)
        if reading is None or reading.table.length >= len(tokens):
            self.end(asked.whom)
            reading = self._readings[asked.whom] = ReadProgress(self.blocks.open(tokens[:-1]))
        start = reading.table.length
        if not self._takes(tokens[start:], start + asked.most):
            return None
        # The last row is always computed, because its logits are needed.
        held = common_prefix(reading.ahead, tokens[start:-1])
        self.blocks.commit(reading.table, reading.ahead[:held])
        reading.ahead.clear()
        behind = len(tokens) - reading.table.length
        if behind > MOST_BEHIND:
            self._read(reading, tokens, min(self.pace.rows, behind - 1))
            return None
        try:
            self.blocks.reserve(reading.table, behind + asked.most)
        except OutOfBlocksError:
            return None
        return reading

    def _takes(self, tokens: Sequence[int], more: int) -> bool:
        """Return whether the model can read these tokens and `more` others."""
        return len(tokens) + more <= self.most_rows and max(tokens, default=0) < self.vocab_size

    def _read(self, reading: ReadProgress, tokens: Sequence[int], most: int, idle: bool = False) -> bool:
        """Compute up to `most` missing rows, at least one. Return whether more are missing and can be read."""
        table = reading.table
        start, stop = table.length, min(table.length + max(most, 1), len(tokens))
        if start >= stop:
            return False
        try:
            self.blocks.reserve(table, stop - start, idle)
            at = (len(tokens) - BEFORE_ANSWER,)
            self.blocks.states.plan(table, reading_plan(start, stop - start, at, idle))
        except OutOfBlocksError:
            return False
        fresh, rows = tokens[start:stop], range(start, stop)
        began = perf_counter()
        moves = None if table.state is None else table.state.moves
        self.runner.run(StepBatch((Span(tuple(table.blocks), start, len(rows), fresh, rows, states=moves),)))
        self._wait()
        self.blocks.commit(table, fresh)
        self.pace.saw(stop - start, perf_counter() - began, self.max_chunk, idle=True)
        return stop < len(tokens)

    def _wait(self) -> None:
        """Wait until the device has computed the rows, because their time decides how many are read at once."""

    def _plan(self, reading: ReadProgress, rows: int) -> bool:
        """Plan the state after the next `rows` rows of a text, if there are any. Return whether there is room."""
        try:
            if rows:
                table = reading.table
                self.blocks.states.plan(table, answer_plan(table, table.length, rows))
        except OutOfBlocksError:
            return False
        return True

    def _span(self, reading: ReadProgress, tokens: Sequence[int], guess: Guess, spare: int | None) -> Span:
        """Return the span of the missing rows of a text, or of one of its guesses, with logits for the last row.

        `spare` is the slot for the state after a guess.
        """
        start, state = reading.rows, reading.table.state
        missing = [*tokens[start:], *guess.tokens[max(start - len(tokens), 0) :]]
        rows = range(start, start + len(missing))
        moves = None if state is None else state.moves
        if state is not None and spare is not None and start >= len(tokens):
            source, row = (spare, start) if reading.ahead else (state.slot, state.row)
            moves = StateMoves(source, row, ((start + 1, spare),))
        return Span(tuple(reading.table.blocks), start, len(missing), missing, rows, wanted=1, states=moves)

    def _wrote(self, reading: ReadProgress, tokens: Sequence[int], span: Span) -> None:
        """Record the rows of a span as written: commit those of the text, keep those of guesses in `ahead`."""
        self.blocks.commit(reading.table, tokens[reading.table.length :])
        reading.ahead += span.tokens[max(len(tokens) - span.start, 0) :]

    def _longer(self, asked: DraftRequest, guess: Guess, logits: Tensor) -> Guess:
        """Extend `guess` by the token drawn from logits [vocab], with the random number, penalties and other settings
        of the text's own next token: so both models choose the same token wherever they agree.
        """
        with torch.inference_mode():
            known = logits[: self.vocab_size]
            drawn = asked.draw(known, guess.tokens) if asked.draw is not None and self.draws else None
            token = int(known.argmax()) if drawn is None else drawn
            sure = float((known[token] - known.logsumexp(0)).exp())
        if token < 0 or not isfinite(sure):
            raise EngineError("its output is not a number")
        return Guess((*guess.tokens, token), chances=(*guess.chances, sure))

    def _let_go(self) -> None:
        """Drop the wish. Its rows stay in the prefix cache."""
        if self._wished is not None:
            self.blocks.close(self._wished.table)
        self._wish, self._wished = [], None
