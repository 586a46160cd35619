"""The input of one step of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize

NONE = -1
"""Stands for the slot of a state that is all zeros."""


@dataclass(frozen=True, slots=True)
class StateMoves:
    """What a span does with the states of recurrent layers."""

    source: int
    """The slot of the state that it goes on from, or NONE."""
    row: int
    """How many rows that state has seen. From there to the start of the span, the log has the rows."""
    saves: tuple[tuple[int, int], ...]
    """After how many rows the state is written to which slot, ascending."""

    def cut(self, row: int) -> "tuple[StateMoves, StateMoves]":
        """Split what a span does into that of its rows before `row` and that of the others. On the way, the state is in
        the slot of a save there, or in that of the last save."""
        before = tuple(save for save in self.saves if save[0] <= row)
        after = self.saves[len(before) :]
        if after and not (before and before[-1][0] == row):
            before = (*before, (row, after[-1][1]))
        seen, slot = before[-1] if before else (self.row, self.source)
        return StateMoves(self.source, self.row, before), StateMoves(slot, seen, after)


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: rows `start` to `start + count` of its block table are computed.

    A row sees every row of the table up to and including itself. Attention uses only the first three fields.
    """

    blocks: tuple[int, ...]
    start: int
    count: int
    tokens: Sequence[int] = ()
    """One per row, like the positions."""
    positions: Sequence[int] = ()
    wanted: int = 0
    """How many rows at the end need logits: 1 to draw a token, more to check guesses as well."""
    answer: int = 0
    """The first row that belongs to decoding; the rows before it belong to the prompt."""
    states: StateMoves | None = None
    """None: the network has no recurrent layers."""

    @property
    def stop(self) -> int:
        """The row after the last one computed: the number of rows that the last row sees."""
        return self.start + self.count

    def cut(self, row: int) -> "tuple[Span | None, Span | None]":
        """Split the span into the rows before `row` and the rows from `row` on; None for an empty part."""
        at = min(max(row - self.start, 0), self.count)
        if at in (0, self.count):
            return (self, None) if at else (None, self)
        moves = (None, None) if self.states is None else self.states.cut(row)
        before, after = (
            Span(
                self.blocks,
                self.start + first,
                end - first,
                self.tokens[first:end],
                self.positions[first:end],
                min(max(self.wanted - (self.count - end), 0), end - first),
                self.answer,
                states,
            )
            for first, end, states in ((0, at, moves[0]), (at, self.count, moves[1]))
        )
        return before, after


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The spans of one step, in the order of their tokens along T, the sum of the counts."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """How many rows are really computed for the rows of prompts, where steps of some sizes are recorded as graphs."""

    alone: tuple[int, ...] = ()
    """Sizes of steps with one prompt, ascending; a prompt with more rows than the largest is computed as it is."""
    together: tuple[int, ...] = ()
    """Sizes of steps with several prompts, ascending; more rows take several such steps. Empty: never padded."""

    def most(self, prompts: int) -> int:
        """Return the largest chunk of this many prompts, in rows, that the host enqueues at once."""
        return self.alone[-1] if prompts == 1 and self.alone else maxsize

    def computed(self, prompts: int, rows: int) -> int:
        """Return how many rows are computed for `prompts` prompts with `rows` rows in total, padding included."""
        whole, rest = self._rest(prompts, rows)
        return whole + min((size for size in (0, *self._sizes(prompts)) if size >= rest), default=rest)

    def whole(self, prompts: int, rows: int) -> int:
        """Return the largest number of rows, at most `rows`, that is computed without padding."""
        whole, rest = self._rest(prompts, rows)
        sizes = self._sizes(prompts)
        if not sizes or rest > sizes[-1]:
            return rows
        return whole + max((size for size in sizes if size <= rest), default=0)

    def _sizes(self, prompts: int) -> tuple[int, ...]:
        return self.alone if prompts == 1 else self.together

    def _rest(self, prompts: int, rows: int) -> tuple[int, int]:
        """Return the rows that fill whole steps, and the rows of the step after them."""
        if prompts == 1 or not self.together:
            return 0, rows
        rest = rows % self.together[-1]
        return rows - rest, rest
