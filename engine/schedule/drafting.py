"""A draft model: a small one of the same tokenizer, whose likeliest next tokens are guesses for a large one.

It has a KV cache of its own, in which texts that begin alike share their rows, and a table for each sequence:

    rows     | read: tokens of the text   | ahead: rows of guesses | reserved
    table    0 ...                  length

A chain of guesses begins with the rows of what was said since the last one. Rows of guesses that turned out right are
read already; those of the others are beyond the end of the table, and are written over.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from engine.batch import Span, StepBatch
from engine.cache.blocks import BlockManager, BlockTable, OutOfBlocksError
from engine.cache.offload import common_prefix
from engine.errors import EngineError
from engine.execute.runner import Runner
from engine.schedule.idle_pace import IdlePace
from engine.speculation.pace import MOST_ROWS
from engine.speculation.sources import NOTHING, Asked, GoesOn, Guess
from models.units import bytes_text

MOST_BEHIND = MOST_ROWS
"""More tokens than these are read before anything is guessed, some of them in each step."""


@dataclass(slots=True, eq=False)
class Reading:
    """How far a text was read."""

    table: BlockTable
    ahead: list[int] = field(default_factory=list)
    """Tokens of the rows behind those of the table."""

    @property
    def rows(self) -> int:
        """How many are written."""
        return self.table.length + len(self.ahead)


@dataclass(slots=True)
class Drafting:
    """Implements `Source`."""

    name: str
    runner: Runner
    blocks: BlockManager
    vocab_size: int
    """Tokens from here on are not known to both models."""
    most_rows: int
    """Of a text."""
    max_chunk: int
    """Most rows of a step that reads."""
    draws: bool = True
    """Whether it has logits for all tokens of the other model, so that these can be drawn from."""
    nbytes: int = 0
    """Of its weights and of its KV cache."""
    cost: float = 0.0
    """What a step of it is believed to take, in steps of the model that it guesses for."""
    pace: IdlePace = field(default_factory=IdlePace)
    _readings: dict[Hashable, Reading] = field(default_factory=dict)
    _wish: list[int] = field(default_factory=list)
    _wished: Reading | None = None

    @property
    def told(self) -> str:
        return f"draft model {self.name} ({bytes_text(self.nbytes)})"

    @property
    def copied_bytes(self) -> int:
        return self.runner.copied_bytes

    def guess(
        self, asked: Sequence[Asked], goes_on: GoesOn, saw: Callable[[int, float], None]
    ) -> list[Guess]:
        self._let_go()
        guesses = [NOTHING] * len(asked)
        going = {at: reading for at, one in enumerate(asked) if (reading := self._caught_up(one)) is not None}
        while going := {at: one for at, one in going.items() if goes_on(at, guesses[at], len(going))}:
            began = perf_counter()
            spans = [self._span(reading, asked[at].tokens, guesses[at]) for at, reading in going.items()]
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
            self._wished = Reading(self.blocks.open(self._wish, idle=True))
        if not self._read(self._wished, self._wish, self.pace.rows, idle=True):
            self._let_go()
        return True

    def _caught_up(self, asked: Asked) -> Reading | None:
        """What was read of a text, once that is nearly all of it and there is room for guesses; else more is read."""
        tokens, reading = asked.tokens, self._readings.get(asked.whom)
        if reading is None or reading.table.length >= len(tokens):
            self.end(asked.whom)
            reading = self._readings[asked.whom] = Reading(self.blocks.open(tokens[:-1]))
        start = reading.table.length
        if not self._takes(tokens[start:], start + asked.most):
            return None
        # The last row is always computed: what follows it is wanted.
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
        """Whether the model can read these tokens, beside so many more."""
        return len(tokens) + more <= self.most_rows and max(tokens, default=0) < self.vocab_size

    def _read(self, reading: Reading, tokens: Sequence[int], most: int, idle: bool = False) -> bool:
        """Compute up to `most` of the rows that are missing. Returns whether more are."""
        table = reading.table
        start, stop = table.length, min(table.length + max(most, 1), len(tokens))
        if start >= stop:
            return False
        try:
            self.blocks.reserve(table, stop - start, idle)
        except OutOfBlocksError:
            return False
        fresh, rows = tokens[start:stop], range(start, stop)
        began = perf_counter()
        self.runner.run(StepBatch((Span(tuple(table.blocks), start, len(rows), fresh, rows),)))
        self._wait()
        self.blocks.commit(table, fresh)
        self.pace.saw(stop - start, perf_counter() - began, self.max_chunk, idle=True)
        return stop < len(tokens)

    def _wait(self) -> None:
        """Until what was to be computed is: how long it takes says how much is read at once."""

    def _span(self, reading: Reading, tokens: Sequence[int], guess: Guess) -> Span:
        """The rows that are missing of a text and its guesses; what follows the last one is wanted."""
        start = reading.rows
        missing = [*tokens[start:], *guess.tokens[max(start - len(tokens), 0) :]]
        rows = range(start, start + len(missing))
        return Span(tuple(reading.table.blocks), start, len(missing), missing, rows, 1)

    def _wrote(self, reading: Reading, tokens: Sequence[int], span: Span) -> None:
        """The rows of a span are there: those of the text to stay, those of guesses for as long as these hold."""
        self.blocks.commit(reading.table, tokens[reading.table.length :])
        reading.ahead += span.tokens[max(len(tokens) - span.start, 0) :]

    def _longer(self, asked: Asked, guess: Guess, logits: Tensor) -> Guess:
        """With the token that is drawn after logits [vocab] with the random number, the penalties and all else that the
        text's own next token will be drawn with: so both models choose the same one wherever they think alike.
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
        """Of what was wished for: its rows stay as cache."""
        if self._wished is not None:
            self.blocks.close(self._wished.table)
        self._wish, self._wished = [], None
