"""What rank 0 tells the others of a step: int64 numbers, nothing pickled."""

from array import array
from itertools import chain
from typing import Protocol

from engine.batch import Span, StepBatch
from engine.cache.kv_cache import Runs

STEP, COPY = 1, 2
_SPAN = 7
"""Numbers before the lists of a span."""


class Follower(Protocol):
    """What does as it is told."""

    def run(self, batch: StepBatch) -> object:
        """Compute a step."""

    def copy_rows(self, source: Runs, target: Runs) -> None:
        """Copy rows of the KV cache."""


def of_step(batch: StepBatch) -> bytes:
    """A step to be computed."""
    numbers = array("q", (STEP, len(batch.spans)))
    for span in batch.spans:
        lists = (span.blocks, span.tokens, span.positions)
        numbers.extend((span.start, span.count, span.wanted, span.answer, *map(len, lists)))
        for each in lists:
            numbers.extend(each)
    return numbers.tobytes()


def of_copy(source: Runs, target: Runs) -> bytes:
    """Rows to be copied."""
    return array("q", chain((COPY, len(source)), chain(*source), chain(*target))).tobytes()


def follow(message: bytes, follower: Follower) -> None:
    """Have done what a message says. Raises ValueError for what is none."""
    numbers = array("q")
    numbers.frombytes(message)
    kind, count = numbers[:2]
    if kind == STEP:
        follower.run(StepBatch(tuple(_spans(numbers, count))))
    elif kind == COPY:
        pairs = list(zip(numbers[2::2], numbers[3::2], strict=True))
        follower.copy_rows(pairs[:count], pairs[count:])
    else:
        raise ValueError(f"a message of kind {kind}")


def _spans(numbers: "array[int]", count: int) -> list[Span]:
    found, at = [], 2
    for _ in range(count):
        start, rows, wanted, answer, *sizes = numbers[at : at + _SPAN]
        at += _SPAN
        lists = []
        for size in sizes:
            lists.append(tuple(numbers[at : at + size]))
            at += size
        blocks, tokens, positions = lists
        found.append(Span(blocks, start, rows, tokens, positions, wanted, answer))
    return found
