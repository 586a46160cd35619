"""The interfaces that a decode runner uses: the program, the device's events, and the sequences."""

from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.block_table import BlockTable
from engine.cache.rows import Rows
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.prefix_groups import KVShape
from engine.params import SamplingParams


class DecodeProgram(Protocol):
    """Runs one token of each sequence through the model, entirely on the device."""

    name: str

    @property
    def cuts(self) -> KernelConfigs | None:
        """How its kernels are cut; None if that cannot be chosen."""
        ...

    @property
    def kv(self) -> KVShape | None:
        """The KV layout needed for sharing; None if the program cannot read a prefix once for several sequences."""
        ...

    def run(self, rows: int, limit: int, own: int = 0) -> Tensor:
        """Enqueue a step of `rows` rows, with tokens in sequence rows below `limit`; return logits [rows, vocab].

        With `own`, `shared` and `members` of the `StepInput` say which sequences read rows together, and each sequence
        has less than `own` unshared rows before that of its newest token.
        """
        ...


class Event(Protocol):
    """A mark in the enqueued work (torch.cuda.Event)."""

    def record(self) -> None:
        """Mark this point."""
        ...

    def synchronize(self) -> None:
        """Wait until all work before the mark is done."""
        ...


class Decoded(Protocol):
    """The parts of a sequence that the runner uses (see `engine.schedule.sequence.Sequence`)."""

    rows: Rows
    params: SamplingParams | None
    table: BlockTable | None
    generated: list[int]
    seed: int

    def allow(self, words: NDArray[np.int32], drawn: int | None = None) -> None:
        """Write the mask of tokens allowed after the newest token, or after `drawn`, which was drawn since."""
        ...

    def allow_each(self, words: Items[NDArray[np.int32]], guesses: Items[int]) -> None:
        """Write the masks of tokens allowed after the newest token and after each of the guesses that follow it."""
        ...
