"""What one step of the model works on."""

from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: rows `start` to `start + count` of its block table are computed.

    A row sees every row of the table up to and including itself. Attention asks for the first three only.
    """

    blocks: tuple[int, ...]
    start: int
    count: int
    tokens: Sequence[int] = ()
    """One a row, as the positions."""
    positions: Sequence[int] = ()
    wanted: int = 0
    """The logits that follow so many of the last rows are: 1 to draw a token, more to check guesses, too."""
    answer: int = 0
    """From which row on decode steps would compute them: those before are a prompt's."""

    @property
    def stop(self) -> int:
        """The row after the last one computed: how many rows the last one sees."""
        return self.start + self.count

    def cut(self, row: int) -> "tuple[Span | None, Span | None]":
        """What of it lies before `row`, and what from there on; None for nothing."""
        at = min(max(row - self.start, 0), self.count)
        parts = (
            Span(
                self.blocks,
                self.start + first,
                end - first,
                self.tokens[first:end],
                self.positions[first:end],
                min(max(self.wanted - (self.count - end), 0), end - first),
                self.answer,
            )
            if first < end
            else None
            for first, end in ((0, at), (at, self.count))
        )
        before, after = parts
        return before, after


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The spans of one step, in the order in which their tokens lie side by side: [T] = sum of the counts."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """How many rows are computed for those that are wanted, where steps of some sizes are recorded."""

    alone: tuple[int, ...] = ()
    """Rows of steps for one prompt, which is computed as it is where it has more than the most."""
    together: tuple[int, ...] = ()
    """Rows of steps for several, which are as many steps as they need. None: all is computed as it is."""

    def most(self, prompts: int) -> int:
        """The most rows of a chunk of so many prompts that the host enqueues at once."""
        return self.alone[-1] if prompts == 1 and self.alone else maxsize

    def computed(self, prompts: int, rows: int) -> int:
        """For so many prompts of so many rows together, padding included."""
        whole, rest = self._rest(prompts, rows)
        return whole + min((size for size in (0, *self._sizes(prompts)) if size >= rest), default=rest)

    def whole(self, prompts: int, rows: int) -> int:
        """The most rows up to `rows` that are computed without padding."""
        whole, rest = self._rest(prompts, rows)
        sizes = self._sizes(prompts)
        if not sizes or rest > sizes[-1]:
            return rows
        return whole + max((size for size in sizes if size <= rest), default=0)

    def _sizes(self, prompts: int) -> tuple[int, ...]:
        return self.alone if prompts == 1 else self.together

    def _rest(self, prompts: int, rows: int) -> tuple[int, int]:
        """The rows of full steps, and of the one after those."""
        if prompts == 1 or not self.together:
            return 0, rows
        rest = rows % self.together[-1]
        return rows - rest, rest
