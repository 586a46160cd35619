"""Steps with several rows of a sequence, each as if decoded alone: they check guesses, or begin a chain of drafts.

    spread      slots, tokens -> a `StepInput` whose "slots" are the rows
    layers      the K and V of all rows first, then every row attends to those before it
    draw        row 0 of each sequence; its row 1 if that token was guessed; ... Of a chain: the last row of each

What draws is the sampler of every other step, with the sequence's own slot: a token has its own random number, its own
penalties. So the slot ends where decoding one by one would have brought it, and the next step goes on from there.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.execute.cuda.given import Given
from engine.execute.cuda.slots import Slots, StepInput
from engine.execute.cuda.tiles import FEW
from engine.sampling.device_sampler import DeviceSampler, Draw

PART = 1024
"""Blocks of a table that are copied at once."""


class ChecksGuesses(Protocol):
    """A decode program that can do it."""

    def check(self, given: StepInput, alone: StepInput, rows: int, limit: int) -> Tensor:
        """As `DecodeProgram.run`, with another `StepInput`, where rows of one sequence may follow each other; logits
        always in the same memory.

        By `alone` each is the only one, in a block of its own.
        """
        ...


class SeveralRows:
    """The device's side of such steps. It belongs to the loop thread."""

    def __init__(self, program: ChecksGuesses, slots: Slots, block_size: int, parts: int = 3) -> None:
        """What is planned has so many parts, each of a number for each row; the first are those of `spread_kernel`."""
        self._program = program
        self._slots = slots
        self._block_size = block_size
        given = slots.given
        device, blocks = given.active.device, given.tables.shape[1]
        self._plan = Given([FEW] * parts, device)

        def step_input(blocks: int, active: Tensor, token: Tensor) -> StepInput:
            counters = torch.zeros(FEW, 2, dtype=torch.int64, device=device)
            tables = torch.zeros(FEW, blocks, dtype=torch.int32, device=device)
            return StepInput(active, token, counters, tables, given.shared, given.members)

        active = torch.full((FEW,), -1, dtype=torch.int32, device=device)
        token = torch.zeros(FEW, dtype=torch.int64, device=device)
        self._rows = step_input(blocks, active, token)
        self._alone = step_input(1, active, token)
        self._logits: dict[int, Tensor] = {}
        """By how many rows: always the same memory, as steps may be recordings."""

    def run(self, rows: int, limit: int, draw: Draw) -> None:
        """Enqueue what was planned: `rows` rows (a count of a graph), none of which lies at `limit` or beyond."""
        self.compute(rows, limit)
        self.draw(rows, draw)

    @torch.inference_mode()
    def compute(self, rows: int, limit: int) -> None:
        """Enqueue what gives the logits of its rows."""
        from engine.kernels.triton.guesses import spread_kernel

        given, to, alone = self._slots.given, self._rows, self._alone
        spread_kernel[(rows,)](
            *self._plan.parts[:3],
            given.token,
            given.counters,
            given.tables,
            given.tables.shape[1],
            to.active,
            to.token,
            to.counters,
            to.tables,
            alone.counters,
            alone.tables,
            BLOCK=self._block_size,
            PART=PART,
        )
        self._logits[rows] = self._program.check(to, alone, rows, limit)

    def draw(self, rows: int, draw: Draw) -> None:
        """Enqueue the draws from the logits that were computed last."""
        raise NotImplementedError

    def plan_nothing(self) -> None:
        """The next step is of nobody: it is only to be compiled or recorded."""
        slots, *_ = self._plan.begin()
        slots.fill(-1)
        self._plan.send()


class GuessedRows(SeveralRows):
    """Steps with rows of guesses. On ranks other than 0 that is all: rank 0 draws, and tells how many guesses held."""

    def plan(self, spans: Items[tuple[int, Items[int]]]) -> None:
        """The next step is of these slots, with the newest token of each and guesses of what follows it."""
        slots, places, guesses = self._plan.begin()
        slots.fill(-1)
        row = 0
        for slot, tokens in spans:
            for place, token in enumerate([0, *tokens]):
                slots[row], places[row], guesses[row] = slot, place, token
                row += 1
        self._plan.send()

    def draw(self, rows: int, draw: Draw) -> None:
        """Draw nothing."""


class Checking(GuessedRows):
    """Steps that check guesses."""

    def __init__(self, program: ChecksGuesses, sampler: DeviceSampler, slots: Slots, block_size: int) -> None:
        super().__init__(program, slots, block_size)
        self._sampler = sampler
        device = slots.given.active.device
        self._chosen = torch.full((FEW, FEW), -1, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def draw(self, rows: int, draw: Draw) -> None:
        """As long as guesses hold; with the masks of rows (`row_words`)."""
        from engine.kernels.triton.guesses import follow_kernel

        given, logits = self._slots.given, self._logits[rows]
        for place in range(rows):
            follow_kernel[(1,)](*self._plan.parts, given.token, self._chosen, place, ROWS=FEW, num_warps=1)
            chosen = self._chosen[place, :rows]
            self._sampler.sample(logits, chosen, given.counters, draw, overlaps=False, by_row=True)


class Start(NamedTuple):
    """A text whose next tokens are to be drafted."""

    slot: int
    tokens: Items[int]
    """The last ones of it, whose rows are missing."""
    row: int
    """Of the first of them."""
    said: int
    """Tokens of the answer so far."""


class Chaining(SeveralRows):
    """Steps that begin chains of drafts: from rows that are missing of texts, wherever slots were before."""

    def __init__(self, program: ChecksGuesses, sampler: DeviceSampler, slots: Slots, block_size: int) -> None:
        super().__init__(program, slots, block_size, parts=6)
        self._sampler = sampler

    def plan(self, starts: Items[Start]) -> None:
        """The next step is of these; with FEW tokens together at most."""
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
        from engine.kernels.triton.guesses import seek_kernel

        _, _, tokens, draws, at, steps = self._plan.parts
        given, numbers = self._slots.given, self._sampler.numbers
        seek_kernel[(rows,)](
            draws, tokens, at, steps, given.token, given.counters, numbers, PITCH=numbers.shape[1]
        )
        super().compute(rows, limit)

    @torch.inference_mode()
    def draw(self, rows: int, draw: Draw) -> None:
        """After the last row of each."""
        chosen = self._plan.parts[3][:rows]
        self._sampler.sample(self._logits[rows], chosen, self._slots.given.counters, draw, overlaps=False)
