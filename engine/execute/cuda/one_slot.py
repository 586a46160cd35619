"""The decode lane as a decode runner with one slot."""

from collections import deque

from torch import Tensor

from engine.execute.cuda.decode_runner import Lane
from engine.schedule.sequence import Sequence


class OneSlot:
    """See `DecodeRunner`."""

    capacity = 1

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._unread: deque[Sequence | None] = deque()
        """Whose token the lane gives next; None: it has left."""

    def join(self, sequence: Sequence, logits: Tensor) -> None:
        """Draw its next token."""
        rows = sequence.rows
        assert sequence.table is not None
        self._lane.begin(sequence, logits, len(rows), rows.next_position, sequence.table.blocks)
        self._unread.append(sequence)

    def launch(self, sequences: list[Sequence]) -> None:
        """Enqueue a step."""
        (sequence,) = sequences
        assert sequence.table is not None
        self._lane.launch(len(sequence.rows) + sequence.unread - 1, sequence.table.blocks)
        self._unread.append(sequence)

    def read(self) -> list[tuple[Sequence, int]]:
        """Wait for the oldest token."""
        sequence = self._unread.popleft()
        return [] if sequence is None else [(sequence, self._lane.read())]

    def leave(self, sequence: Sequence) -> None:
        """What it has not read is not read any more."""
        self._lane.sequence = None
        self._unread = deque(None for _ in self._unread)
