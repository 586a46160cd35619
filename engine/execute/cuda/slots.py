"""The device memory that a decode step reads about the sequences in its slots, and how the host changes it."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from engine.batch import NONE, StateMoves
from engine.cache.group_pool import GroupPool
from engine.execute.cuda.prefix_groups import most_members

NO_MOVES = NONE, NONE, 0, 1
"""The `moves` of a slot whose sequence has no states yet."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """The inputs of a decode step, all on the device, so that the next step needs nothing from the host."""

    active: Tensor
    """int32 [rows]: the slot of each row of the step; unused rows come last and have -1."""
    token: Tensor
    """int64 [slots]: the newest token."""
    counters: Tensor
    """int64 [slots, 2]: the newest token's row in its sequence, and its position."""
    tables: tuple[Tensor, ...]
    """int32 [slots, blocks] for each group of layers (`engine/cache/groups.py`): the block tables."""
    shared: Tensor
    """int32 [rows]: how many sequence rows a row of the step shares with others; read only by steps with sharing."""
    members: Tensor
    """int32 [most_members]: the step's rows in each tile (`Sharing`), tile after tile, -1 for none."""
    moves: Tensor
    """int32 [slots, 4] for recurrent layers: the slots of the state to go on from and of that after the next row, -1
    for none; how many rows the first of them has not seen; the number of the step's rows that are of the sequence."""


@dataclass(frozen=True, slots=True)
class Changes:
    """New numbers by their index in the words and in the counters of a `Slots`."""

    words: dict[int, int]
    counters: dict[int, int]


@dataclass(frozen=True, slots=True)
class DividedStep:
    """A step as sent to other ranks: the arguments of `DecodeProgram.run`, and the changes in `Slots`."""

    changes: Changes
    rows: int
    limit: int
    own: int


@dataclass(frozen=True, slots=True)
class DividedCheck:
    """A step that checks guesses, as sent to other ranks: arguments of `SeveralRows.compute` and `Checking.plan`."""

    changes: Changes
    rows: int
    limit: int
    spans: tuple[tuple[int, tuple[int, ...]], ...]


class Slots:
    """The host's side of a `StepInput`: it knows what the device holds, and sends only what differs.

    A change is enqueued, so it takes effect after the steps launched before it. All changes of a step are sent in one
    copy from pinned memory, which torch does not reuse before the copy is done.
    """

    def __init__(
        self, slots: int, rows: int, blocks: int, token: Tensor, pools: Items[GroupPool] = ()
    ) -> None:
        """Allocate on the device of token, int64 [slots], for steps of up to `rows` rows, tables of `blocks` blocks.

        `pools` are those of the groups but the primary.
        """
        groups = 1 + len(pools)
        together = -(-rows // 16) * 16
        tiles = together + -(-rows // 16) * 16
        moves = tiles + -(-most_members(rows) // 16) * 16
        start = moves + 4 * slots
        self._words = torch.zeros(start + groups * slots * blocks, dtype=torch.int32, device=token.device)
        self._words[:rows] = -1
        self._words[tiles:moves] = -1
        given_moves = self._words[moves:start].view(slots, 4)
        given_moves.copy_(torch.tensor(NO_MOVES))
        counters = torch.zeros(slots, 2, dtype=torch.int64, device=token.device)
        self.given = StepInput(
            self._words[:rows],
            token,
            counters,
            self._words[start:].view(groups, slots, blocks).unbind(),
            self._words[together : together + rows],
            self._words[tiles : tiles + most_members(rows)],
            given_moves,
        )
        self._moves = [(moves + 4 * slot, list(NO_MOVES)) for slot in range(slots)]
        self._starts = [start + group * slots * blocks for group in range(groups)]
        self._width = blocks
        self._active = [-1] * rows
        self._together = [(together, [0] * rows), (tiles, [-1] * most_members(rows))]
        self._pools = (None, *pools)
        self._tables: list[list[list[int]]] = [[[] for _ in range(slots)] for _ in self._pools]
        self._changes: dict[int, int] = {}
        self._places: dict[int, int] = {}

    def put(self, slot: int, row: int, position: int) -> None:
        """Give `slot` to a sequence: see `place`. Its block tables are not known any more."""
        self.place(slot, row, position)
        for tables in self._tables:
            tables[slot] = []

    def place(self, slot: int, row: int, position: int) -> None:
        """Set the row and position of the newest token of `slot`. The device advances both with each step."""
        self._places[2 * slot] = row
        self._places[2 * slot + 1] = position

    def show(self, slot: int, blocks: Items[int], first: int = 0, firsts: Items[int] = ()) -> None:
        """Set the block tables of `slot`. Blocks are only appended, but the last full one may be replaced.

        Blocks before index `first` are released one after the other; `firsts` is the same for the groups but the
        primary, 0 where it is missing.
        """
        self._show(slot, 0, blocks, first)
        for group in range(1, len(self._pools)):
            self._show(slot, group, blocks, firsts[group - 1] if firsts else 0)

    def _show(self, slot: int, group: int, blocks: Items[int], first: int) -> None:
        known, pool = self._tables[group][slot], self._pools[group]
        at = self._starts[group] + slot * self._width
        for index in reversed(range(min(first, len(known)))):
            blank = blocks[index] if pool is None else pool.blank
            if known[index] == blank:
                break
            self._changes[at + index] = known[index] = blank
        del known[len(blocks) :]  # blocks that guesses did not need were returned
        start = max(len(known) - 2, 0)
        shown = blocks[start:]
        if pool is not None:
            places = enumerate(shown, start)
            shown = [pool.blank if index < first else pool.slot(block) for index, block in places]
        if known[start:] == shown:
            return
        for index, place in enumerate(shown, start):
            if index >= len(known) or known[index] != place:
                self._changes[at + index] = place
        known[start:] = shown

    def move(self, slot: int, moves: StateMoves, row: int) -> None:
        """Set what the next steps of `slot` do with states. The first of them begins with `row`, and each leaves a
        state after one row."""
        ((_, target),) = moves.saves
        start, known = self._moves[slot]
        self._differ(start, known, (moves.source, target, row - moves.row))

    def activate(self, slots: Items[int], rows: int) -> None:
        """Make these the slots of the next steps, which have `rows` rows."""
        wanted = [*slots, *(-1 for _ in range(rows - len(slots)))]
        if wanted != self._active[:rows]:
            for row, slot in enumerate(wanted):
                if self._active[row] != slot:
                    self._changes[row] = slot
            self._active[:rows] = wanted

    def share(self, shared: list[int], members: list[list[int]]) -> None:
        """Set what the next steps with sharing read: the result of `share` in `prefix_groups.py`."""
        for (start, known), wanted in zip(self._together, (shared, list(chain(*members))), strict=True):
            self._differ(start, known, wanted)

    def _differ(self, start: int, known: list[int], wanted: Items[int]) -> None:
        """Have the numbers from the word `start` on become those `wanted`, where they differ from those `known`."""
        for index, number in enumerate(wanted):
            if known[index] != number:
                self._changes[start + index] = known[index] = number

    def send(self) -> Changes:
        """Enqueue all pending changes and return them."""
        changed = Changes(self._changes, self._places)
        self._changes, self._places = {}, {}
        self.change(changed)
        return changed

    def change(self, asked: Changes) -> None:
        """Enqueue the given changes."""
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
