"""What one step of the model works on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: rows `start` to `start + count` of its block table are computed.

    A row sees every row of the table up to and including itself.
    """

    blocks: tuple[int, ...]
    start: int
    count: int

    @property
    def stop(self) -> int:
        """The row after the last one computed: how many rows the last one sees."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one step, in the order in which their tokens lie side by side: [T] = sum of the counts."""

    spans: tuple[Span, ...]
