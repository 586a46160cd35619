"""What a decode runner asks of others: of a program, of the device, and of the sequences."""

from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.blocks import BlockTable
from engine.cache.rows import Rows
from engine.execute.cuda.sharing import KVShape
from engine.params import SamplingParams


class DecodeProgram(Protocol):
    """One token of each sequence through the model, wholly on the device."""

    name: str

    @property
    def kv(self) -> KVShape | None:
        """What to know to share; None: it cannot read a prefix once for several sequences."""
        ...

    def run(self, rows: int, limit: int, own: int = 0) -> Tensor:
        """Enqueue a step of the first `rows` rows, whose tokens lie in rows below `limit`; logits [rows, vocab].

        With `own`, `shared` and `members` of the `StepInput` say who reads what together, and every sequence has less
        than `own` rows before its newest token's that it does not share.
        """
        ...


class Event(Protocol):
    """A place in what was enqueued (torch.cuda.Event)."""

    def record(self) -> None:
        """Here."""
        ...

    def synchronize(self) -> None:
        """Wait until everything before it is done."""
        ...


class Decoded(Protocol):
    """What the runner reads of a sequence (see `engine.schedule.sequence.Sequence`), and asks of a constrained one."""

    rows: Rows
    params: SamplingParams | None
    table: BlockTable | None
    generated: list[int]
    seed: int

    def allow(self, words: NDArray[np.int32], drawn: int | None = None) -> None:
        """Write which tokens may follow the newest one, or `drawn`, which was drawn after it."""
        ...

    def allow_each(self, words: Items[NDArray[np.int32]], guesses: Items[int]) -> None:
        """Write which tokens may follow the newest one, and which each of the guesses after it."""
        ...
