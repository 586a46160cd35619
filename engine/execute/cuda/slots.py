"""What a decode step reads of the sequences in its slots, in device memory, and how the host changes it."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from engine.execute.cuda.sharing import most_members


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a decode step reads, all on the device, so that the next step needs nothing from the host."""

    active: Tensor
    """int32 [rows]: the slot of each row of the step, -1 for none; those that have one come first."""
    token: Tensor
    """int64 [slots]: the newest token."""
    counters: Tensor
    """int64 [slots, 2]: the newest token's row in its sequence, its position."""
    tables: Tensor
    """int32 [slots, blocks]"""
    shared: Tensor
    """int32 [rows]: how many rows a row of the step reads together with others; only steps with sharing look at it."""
    members: Tensor
    """int32 [most_members]: the rows of the step in each tile (`Sharing`), tile after tile, -1 for none."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Numbers by their places in the words and in the counters of a `Slots`."""

    words: dict[int, int]
    counters: dict[int, int]


@dataclass(frozen=True, slots=True)
class DividedStep:
    """What other ranks have to know of a step: see `DecodeProgram.run`, and what has changed in `Slots`."""

    changes: Changes
    rows: int
    limit: int
    own: int


class Slots:
    """The host's side of a `StepInput`: it knows what the device has, and sends what differs.

    A change is enqueued, so that it comes after the steps that were launched before. All changes of a step are one copy
    from pinned memory, which torch does not give away again before the copy is done.
    """

    def __init__(self, slots: int, rows: int, blocks: int, token: Tensor) -> None:
        """For steps of up to `rows` rows and sequences of up to `blocks` blocks; token int64 [slots], on the device."""
        together = -(-rows // 16) * 16
        tiles = together + -(-rows // 16) * 16
        start = tiles + -(-most_members(rows) // 16) * 16
        self._words = torch.zeros(start + slots * blocks, dtype=torch.int32, device=token.device)
        self._words[:rows] = -1
        self._words[tiles:start] = -1
        counters = torch.zeros(slots, 2, dtype=torch.int64, device=token.device)
        self.given = StepInput(
            self._words[:rows],
            token,
            counters,
            self._words[start:].view(slots, blocks),
            self._words[together : together + rows],
            self._words[tiles : tiles + most_members(rows)],
        )
        self._start = start
        self._active = [-1] * rows
        self._together = [(together, [0] * rows), (tiles, [-1] * most_members(rows))]
        self._tables: list[list[int]] = [[] for _ in range(slots)]
        self._changes: dict[int, int] = {}
        self._places: dict[int, int] = {}

    def put(self, slot: int, row: int, position: int) -> None:
        """The newest token of `slot` lies at `row` and has this position; both count on by themselves."""
        self._places[2 * slot] = row
        self._places[2 * slot + 1] = position
        self._tables[slot] = []

    def show(self, slot: int, blocks: Items[int], first: int = 0) -> None:
        """The block table of `slot`: blocks come at the end, and the last full one may be replaced.

        Those before number `first` are let go of, one after the other.
        """
        known = self._tables[slot]
        at = self._start + slot * self.given.tables.shape[1]
        for index in reversed(range(min(first, len(known)))):
            if known[index] == blocks[index]:
                break
            self._changes[at + index] = known[index] = blocks[index]
        del known[len(blocks) :]  # what guesses did not need was given back
        start = max(len(known) - 2, 0)
        if known[start:] == blocks[start:]:
            return
        for index in range(start, len(blocks)):
            if index >= len(known) or known[index] != blocks[index]:
                self._changes[at + index] = blocks[index]
        known[start:] = blocks[start:]

    def activate(self, slots: Items[int], rows: int) -> None:
        """The next steps, of `rows` rows, are of these slots."""
        wanted = [*slots, *(-1 for _ in range(rows - len(slots)))]
        if wanted != self._active[:rows]:
            for row, slot in enumerate(wanted):
                if self._active[row] != slot:
                    self._changes[row] = slot
            self._active[:rows] = wanted

    def share(self, shared: list[int], members: list[list[int]]) -> None:
        """The next steps with sharing: what `share` of `sharing.py` says."""
        for (start, known), wanted in zip(self._together, (shared, list(chain(*members))), strict=True):
            for index, number in enumerate(wanted):
                if known[index] != number:
                    self._changes[start + index] = known[index] = number

    def send(self) -> Changes:
        """Enqueue what has changed, and return it."""
        changed = Changes(self._changes, self._places)
        self._changes, self._places = {}, {}
        self.change(changed)
        return changed

    def change(self, asked: Changes) -> None:
        """Enqueue changes."""
        changes = [(self._words, asked.words), (self.given.counters.view(-1), asked.counters)]
        where = [index for _, changed in changes for index in changed]
        if not where:
            return
        what = [value for _, changed in changes for value in changed.values()]
        pinned = torch.tensor([where, what], pin_memory=self._words.is_cuda)
        sent = pinned.to(self._words.device, non_blocking=True)
        start = 0
        for target, changed in changes:
            if changed:
                end = start + len(changed)
                target.index_copy_(0, sent[0, start:end], sent[1, start:end].to(target.dtype))
                start = end
