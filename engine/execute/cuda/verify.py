"""Steps with several rows per sequence, each computed as if decoded alone: to check guesses, or to begin drafts.

    spread      slots, tokens -> a `StepInput` whose "slots" are the rows
    layers      in each, K and V of all rows are written first; then every row attends to those before it
    draw        row 0 of each sequence; its row 1 if that token was guessed; ... For a chain of drafts, the last row

The sampler is that of every other step and uses the sequence's own slot, so each token has its own random number and
penalties. The slot ends up in the state that decoding row by row would have left, and the next step continues there.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.execute.cuda.input_buffers import StagedInputs
from engine.execute.cuda.slots import Slots, StepInput
from engine.execute.cuda.tiles import FEW
from engine.sampling.device_sampler import DeviceSampler, DrawFeatures

PART = 1024
"""Entries of a block table that `spread_kernel` copies at once."""


class ChecksGuesses(Protocol):
    """A decode program that can compute several rows of a sequence in one step."""

    def check(self, given: StepInput, alone: StepInput, rows: int, limit: int) -> Tensor:
        """Enqueue a step as `DecodeProgram.run` does, but of `given`, in which rows of one sequence may follow each
        other. Return logits [rows, vocab], for the same `rows` always in the same memory.

        `alone` describes the same rows, each as the only one of a sequence, in its own block.
        """
        ...


class SeveralRows:
    """Holds the device state of such steps. It belongs to the loop thread."""

    def __init__(self, program: ChecksGuesses, slots: Slots, block_size: int, parts: int = 3) -> None:
        """Allocate for plans of `parts` arrays of one number per row; the first three are those of `spread_kernel`."""
        self._program = program
        self._slots = slots
        self._block_size = block_size
        given = slots.given
        device, groups, blocks = given.active.device, len(given.tables), given.tables[0].shape[1]
        self._plan = StagedInputs([FEW] * parts, device)

        def step_input(blocks: int, active: Tensor, token: Tensor) -> StepInput:
            counters = torch.zeros(FEW, 2, dtype=torch.int64, device=device)
            tables = [torch.zeros(FEW, blocks, dtype=torch.int32, device=device) for _ in range(groups)]
            moves = torch.zeros(FEW, 4, dtype=torch.int32, device=device)
            return StepInput(active, token, counters, tuple(tables), given.shared, given.members, moves)

        active = torch.full((FEW,), -1, dtype=torch.int32, device=device)
        token = torch.zeros(FEW, dtype=torch.int64, device=device)
        self._rows = step_input(blocks, active, token)
        self._alone = step_input(1, active, token)
        self._logits: dict[int, Tensor] = {}
        """The logits by number of rows: always the same memory, because steps may be recorded."""

    def run(self, rows: int, limit: int, draw: DrawFeatures) -> None:
        """Enqueue the planned step of `rows` rows (the size of a graph), all of which lie below row `limit`."""
        self.compute(rows, limit)
        self.draw(rows, draw)

    @torch.inference_mode()
    def compute(self, rows: int, limit: int) -> None:
        """Enqueue the first half of a step, which computes the logits of its rows."""
        from engine.kernels.triton.verify_rows import spread_kernel

        given, to, alone = self._slots.given, self._rows, self._alone
        for tables, to_tables, alone_tables in zip(given.tables, to.tables, alone.tables, strict=True):
            spread_kernel[(rows,)](
                *self._plan.parts[:3],
                given.token,
                given.counters,
                tables,
                tables.shape[1],
                to.active,
                to.token,
                to.counters,
                to_tables,
                alone.counters,
                alone_tables,
                given.moves,
                to.moves,
                BLOCK=self._block_size,
                PART=PART,
                ROWS=FEW,
            )
        self._logits[rows] = self._program.check(to, alone, rows, limit)

    def draw(self, rows: int, draw: DrawFeatures) -> None:
        """Enqueue the second half of a step, which draws from these logits."""
        raise NotImplementedError

    def plan_nothing(self) -> None:
        """Plan a step without sequences, which is run only to compile or record it."""
        slots, *_ = self._plan.begin()
        slots.fill(-1)
        self._plan.send()


class GuessedRows(SeveralRows):
    """Steps with rows of guesses. On ranks other than 0 that is all: rank 0 draws, and tells how many guesses held."""

    def plan(self, spans: Items[tuple[int, Items[int]]]) -> None:
        """Plan a step of these slots: for each its newest token, and the guesses for the tokens after it."""
        slots, places, guesses = self._plan.begin()
        slots.fill(-1)
        row = 0
        for slot, tokens in spans:
            for place, token in enumerate([0, *tokens]):
                slots[row], places[row], guesses[row] = slot, place, token
                row += 1
        self._plan.send()

    def draw(self, rows: int, draw: DrawFeatures) -> None:
        """Draw nothing."""


class Checking(GuessedRows):
    """Steps that check guesses."""

    def __init__(self, program: ChecksGuesses, sampler: DeviceSampler, slots: Slots, block_size: int) -> None:
        super().__init__(program, slots, block_size)
        self._sampler = sampler
        device = slots.given.active.device
        self._chosen = torch.full((FEW, FEW), -1, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def draw(self, rows: int, draw: DrawFeatures) -> None:
        """Enqueue the draws of each sequence, as long as its guesses hold, with the masks of the rows (`row_words`)."""
        from engine.kernels.triton.verify_rows import follow_kernel

        given, logits = self._slots.given, self._logits[rows]
        for place in range(rows):
            follow_kernel[(1,)](*self._plan.parts, given.token, self._chosen, place, ROWS=FEW, num_warps=1)
            chosen = self._chosen[place, :rows]
            self._sampler.sample(logits, chosen, given.counters, draw, overlaps=False, by_row=True)


class DraftStart(NamedTuple):
    """A text whose next tokens are to be drafted."""

    slot: int
    tokens: Items[int]
    """Its last tokens, whose rows have not been computed."""
    row: int
    """The row of the first of them."""
    said: int
    """The number of tokens of the answer so far."""


class Chaining(SeveralRows):
    """Steps that begin chains of drafts: they compute the missing rows of texts, wherever the slots were before."""

    def __init__(self, program: ChecksGuesses, sampler: DeviceSampler, slots: Slots, block_size: int) -> None:
        super().__init__(program, slots, block_size, parts=6)
        self._sampler = sampler

    def plan(self, starts: Items[DraftStart]) -> None:
        """Plan a step that begins at `starts`, which have at most FEW tokens together."""
        slots, places, tokens, draws, at, steps = self._plan.begin()
        slots.fill(-1)
        draws.fill(-1)
        row = 0
        for start in starts:
            for before in reversed(range(len(start.tokens))):
                slots[row], places[row], tokens[row] = start.slot, -before, start.tokens[-1 - before]
                row += 1
            draws[row - 1], at[row - 1] = start.slot, start.row + len(start.tokens) - 1
            steps[row - 1] = start.said
        self._plan.send()

    def plan_nothing(self) -> None:
        self.plan([])

    @torch.inference_mode()
    def compute(self, rows: int, limit: int) -> None:
        from engine.kernels.triton.verify_rows import seek_kernel

        _, _, tokens, draws, at, steps = self._plan.parts
        given, numbers = self._slots.given, self._sampler.numbers
        seek_kernel[(rows,)](
            draws, tokens, at, steps, given.token, given.counters, numbers, PITCH=numbers.shape[1]
        )
        super().compute(rows, limit)

    @torch.inference_mode()
    def draw(self, rows: int, draw: DrawFeatures) -> None:
        """Enqueue the draws after the last row of each text."""
        chosen = self._plan.parts[3][:rows]
        self._sampler.sample(self._logits[rows], chosen, self._slots.given.counters, draw, overlaps=False)
