"""The decode runner: several sequences decode on the device, and the host reads their tokens one step behind.

    device   | step i: tokens i-1 -> tokens i | step i+1: tokens i -> tokens i+1 | ...
    host     | launch i+1, wait for tokens i  | their text, their events; launch i+2 ...

Each sequence has a slot. Its token, row, position, block table, sampling settings and random numbers live in device
memory by slot, so the host never waits for a token before it launches the next step. A step names its slots: one
recorded graph serves any sequences of the same number of rows and context limit. If a token turns out to be the last of
its sequence, the token after it is discarded.
"""

from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.device import has_pdl
from engine.execute.cuda.decode_protocols import Decoded, DecodeProgram, Event
from engine.execute.cuda.following import NullSampler
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.prefix_groups import LEAST, choose_sharing, share
from engine.execute.cuda.slots import Changes, DividedCheck, DividedStep, Slots, StepInput
from engine.execute.cuda.tiles import FEW, SMALLEST, context_limit
from engine.execute.cuda.verify import Checking, GuessedRows, SeveralRows
from engine.params import SamplingParams
from engine.sampling.device_sampler import DeviceSampler, DrawFeatures
from engine.sampling.sampler import SampledToken
from models.network import Network

ROWS = (1, 2, 4, FEW, 16, 32, 64, 96, 128, 192, 256)
"""Numbers of rows a step may have. Unused rows cost next to nothing, and every size is a graph of its own."""
USUAL_CONTEXT = 2560
"""The largest context for which graphs of many rows are recorded ahead."""


S = TypeVar("S", bound=Decoded)


@dataclass(slots=True, eq=False)
class SlotState(Generic[S]):
    """A sequence in a slot. A sequence that leaves and comes back gets a new state."""

    sequence: S
    slot: int
    row: int
    """The row of its newest token, whether the host has read that token or not."""
    token: int
    """The index of that token within the answer."""
    ahead: int
    """How far the position of a token is beyond its row."""
    logprobs: int | None = None
    guided: bool = False
    """Whether the sequence has a constraint."""
    left: bool = False


@dataclass(slots=True)
class PendingStep(Generic[S]):
    """A step whose logits are computed, and whose tokens are drawn once their masks are ready."""

    seats: list[SlotState[S]]
    rows: int
    logits: Tensor


def rows_for(count: int) -> int:
    """Return the number of rows of a step of `count` sequences."""
    return next(rows for rows in ROWS if rows >= count)


class DecodeRunner(Generic[S]):
    """Holds the device state of the sequences that decode. It belongs to the loop thread."""

    counts: tuple[int, ...] = tuple(rows for rows in ROWS if 1 < rows <= FEW)
    """Sizes of steps that have several rows of one sequence."""
    tells = False
    """Whether usual steps return log-probabilities."""

    def __init__(
        self,
        program: DecodeProgram,
        sampler: DeviceSampler | NullSampler,
        slots: Slots,
        rows: int,
        graphs: Graphs | None,
        event: Callable[[], Event],
        several: SeveralRows | None = None,
    ) -> None:
        """`rows` is the most that a sequence holds. Without `graphs` every step runs kernel by kernel; without
        `several`, no step has more than one row of a sequence."""
        self.program = program
        self.sampler = sampler
        self.slots = slots
        self.rows = rows
        self.capacity = len(slots.given.token)
        self._graphs = graphs
        self._event = event
        self._several = several
        self.together: Callable[[DividedStep | DividedCheck], AbstractContextManager[None]] | None = None
        """The context in which a step is enqueued, so that other ranks can `follow` it; None if there are none."""
        self.watch: Callable[[], None] = lambda: None
        """Called when a step has ended. Raises EngineError if other ranks were lost and its tokens mean nothing."""
        self._sent = Changes({}, {})
        self._ahead: list[tuple[int, int, DrawFeatures]] = []
        """Steps to compile and record in idle time, the next one last."""
        self._free = list(range(self.capacity))[::-1]
        self._seats: dict[S, SlotState[S]] = {}
        self._every = torch.arange(self.capacity, dtype=torch.int32, device=slots.given.active.device)
        self._unread: deque[tuple[Event, list[tuple[SlotState[S], int]]]] = deque()
        """One entry for each unread `join` and `launch`: the event at its end, and each sequence's token index."""
        self._events: list[Event] = []
        self._held: PendingStep[S] | None = None
        self._logits: dict[tuple[int, int, int], Tensor] = {}
        """The logits of steps that only compute them, by step size: a graph always writes to the same memory."""
        self._together: list[SlotState[S]] = []
        """The slots of the step that `_shared` was computed for."""
        self._shared: list[int] = []
        """The number of rows that each of those slots shares with others; empty if none shares any."""

    @property
    def name(self) -> str:
        """The program's name, for people."""
        graphs = self._graphs is not None and self._graphs.problem is None
        return f"{self.program.name}, CUDA graph" if graphs else self.program.name

    def join(self, sequence: S, logits: Tensor | None) -> None:
        """Give `sequence` a free slot and draw its next token from logits [vocab]. Never waits.

        Without logits, its newest token was already drawn and the row of that token is computed next; there is nothing
        to read. Raises EngineError, without taking a slot, if the sequence's constraint cannot be followed.
        """
        assert sequence.params is not None
        rows, drawn, params, slot = sequence.rows, sequence.generated, sequence.params, self._free[-1]
        guided = params.constraint is not None
        if guided:
            sequence.allow(self.sampler.words(slot))
        self._free.pop()
        known = int(logits is None)
        row, position = len(rows) - known, rows.positions[-1] if known else rows.next_position
        seat = SlotState(sequence, slot, row, len(drawn) - known, position - row, params.logprobs, guided)
        self._seats[sequence] = seat
        prompt = rows.token_ids[: len(rows) - len(drawn)]
        self.sampler.load(slot, params, prompt, drawn, sequence.seed)
        # Sent together with the changes of the next step, which is the first to read it.
        self.slots.put(slot, row, position)
        if logits is None:
            self.slots.given.token[slot : slot + 1].fill_(rows.token_ids[-1])
        else:
            every = self._every[slot : slot + 1]
            self.sampler.sample(logits.view(1, -1), every, None, self.sampler.draw([slot]))
            self._note([seat])

    def launch(self, sequences: list[S]) -> bool:
        """Enqueue a step of these sequences. Their block tables have room for the row of the newest token, read or not.

        Return True if any sequence is constrained: then only logits are computed, and `draw` must enqueue the rest once
        the masks are known, that is, after the tokens of the previous step were read and passed to `guide`.
        """
        seats = [self._seats[sequence] for sequence in sequences]
        taken = [seat.slot for seat in seats]
        self._show(seats)
        furthest, own = max(seat.row for seat in seats), self._own_rows(seats)
        guided = any(seat.guided for seat in seats)
        if guided:
            rows = self._activate(taken)
            logits = self._compute(rows, context_limit(furthest), 0 if own is None else context_limit(own))
            self._held = PendingStep(seats, rows, logits)
        else:
            self.step(taken, furthest, own)
        for seat in seats:
            seat.row += 1
            seat.token += 1
        if not guided:
            self._note(seats)
        return guided

    def _show(self, seats: list[SlotState[S]]) -> None:
        """Tell the device the block tables and the states of these sequences."""
        for seat in seats:
            table = seat.sequence.table
            assert table is not None
            self.slots.show(seat.slot, table.blocks, table.first, table.firsts)
            if table.state is not None:
                self.slots.move(seat.slot, table.state.moves, seat.row)

    @property
    def checks_guesses(self) -> bool:
        """Whether `check` may be called."""
        return isinstance(self._several, GuessedRows)

    @property
    def firsts(self) -> int:
        """Number of steps so far that were slower than usual because they compiled or recorded something."""
        return 0 if self._graphs is None else self._graphs.firsts

    def check(
        self, spans: list[tuple[S, tuple[int, ...]]], failed: Callable[[S, Exception], None]
    ) -> list[tuple[S, list[SampledToken]]]:
        """Run a step of each sequence's newest token and the guesses after it, and wait for it.

        Return each sequence's new tokens: one, and one more for each guess that held together with all guesses before
        it. There are FEW rows at most, each block table has room for them, and all earlier tokens have been read.
        Constraints are evaluated while the logits are computed. `failed` receives any sequence whose constraint fails,
        and must make it leave.
        """
        checking = self._several
        assert isinstance(checking, GuessedRows)
        assert not self._unread
        seats = [(self._seats[sequence], guesses) for sequence, guesses in spans]
        self._show([seat for seat, _ in seats])
        rows = rows_for(sum(1 + len(guesses) for _, guesses in seats))
        limit = context_limit(max(seat.row + len(guesses) for seat, guesses in seats))
        planned = tuple((seat.slot, guesses) for seat, guesses in seats)
        step = DividedCheck(self.slots.send(), rows, limit, planned)
        checking.plan(planned)
        draw = self.sampler.draw([seat.slot for seat, _ in seats])
        if any(seat.guided for seat, _ in seats):
            with self._with_others(step):
                self._enqueue(("check logits", rows, limit), lambda: checking.compute(rows, limit))
            self._guide_rows(seats, failed)
            self._enqueue(("check draws", rows, draw), lambda: checking.draw(rows, draw))
        else:
            with self._with_others(step):
                self._run_several(checking, rows, limit, draw)
        self._wait()
        self.watch()
        return [(seat.sequence, self._checked(seat, guesses)) for seat, guesses in seats if not seat.left]

    def _guide_rows(
        self, seats: list[tuple[SlotState[S], tuple[int, ...]]], failed: Callable[[S, Exception], None]
    ) -> None:
        """Write the masks for the rows of a step that checks guesses."""
        row = 0
        for seat, guesses in seats:
            words = [self.sampler.row_words(row + place) for place in range(1 + len(guesses))]
            row += len(words)
            if seat.guided:
                try:
                    seat.sequence.allow_each(words, guesses)
                except Exception as error:  # noqa: BLE001 - it is this sequence's alone
                    failed(seat.sequence, error)

    def _checked(self, seat: SlotState[S], guesses: Items[int]) -> list[SampledToken]:
        """Return the tokens drawn after the newest token of `seat` and its guesses, up to the first wrong guess."""
        places = [(seat.slot, seat.token + 1 + place, seat.logprobs) for place in range(1 + len(guesses))]
        drawn = self.sampler.drawn(places)
        held = 0
        while held < len(guesses) and drawn[held].token_id == guesses[held]:
            held += 1
        seat.row += 1 + held
        seat.token += 1 + held
        if self.together is not None:  # other ranks do not know which guesses held
            self.slots.place(seat.slot, seat.row, seat.row + seat.ahead)
        return drawn[: 1 + held]

    def while_idle(self) -> bool:
        """Compile or record one step of several rows, unless any slot is taken. Return whether more are left."""
        if self._ahead and self._several is not None and not self._seats:
            rows, limit, draw = self._ahead.pop()
            self._several.plan_nothing()
            with self._with_others(DividedCheck(self.slots.send(), rows, limit, ())):
                self._run_several(self._several, rows, limit, draw)
        return bool(self._ahead) and not self._seats

    def _wait(self) -> None:
        """Wait until all enqueued work is done."""
        event = self._event()
        event.record()
        event.synchronize()

    def _to_record(self) -> list[tuple[int, int, DrawFeatures]]:
        """Return the likely steps of several rows. Each is listed twice: the second run records it."""
        if self._graphs is None or self._several is None:
            return []
        limits = [SMALLEST]
        while limits[-1] < min(self.rows, USUAL_CONTEXT):
            limits.append(2 * limits[-1])
        draws = [DrawFeatures(race, False, self.tells) for race in (True, False)]
        found = [(rows, limit, draw) for limit in limits for draw in draws for rows in self.counts]
        return [each for each in reversed(found) for _ in range(2)]

    def _run_several(self, several: SeveralRows, rows: int, limit: int, draw: DrawFeatures) -> None:
        self._enqueue(("several", rows, limit, draw), lambda: several.run(rows, limit, draw))

    def _enqueue(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run `step`, from its recording if there are graphs."""
        if self._graphs is None:
            step()
        else:
            self._graphs.run(key, step)

    def guide(self, sequence: S, drawn: int | None) -> None:
        """Pass the newest token of `sequence` to its constraint before `draw`; None if all its tokens are known to it.
        Raises EngineError if the constraint fails."""
        seat = self._seats[sequence]
        if seat.guided and (drawn is None or drawn >= 0):
            sequence.allow(self.sampler.words(seat.slot), drawn)

    def draw(self) -> None:
        """Enqueue the draws of the step that `launch` left open."""
        assert self._held is not None
        held, self._held = self._held, None
        draw = self.sampler.draw([seat.slot for seat in held.seats])
        with torch.inference_mode():
            self.sampler.sample(
                held.logits, self.slots.given.active[: held.rows], self.slots.given.counters, draw
            )
        self._note(held.seats)

    def read(self) -> list[tuple[S, SampledToken]]:
        """Wait for the oldest unread `join` or `launch`; return its sequences and their tokens.

        Sequences that have left since are omitted.
        """
        event, drawn = self._unread.popleft()
        event.synchronize()
        self.watch()
        self._events.append(event)
        there = [(seat, number) for seat, number in drawn if not seat.left]
        tokens = self.sampler.drawn([(seat.slot, number, seat.logprobs) for seat, number in there])
        return [(seat.sequence, token) for (seat, _), token in zip(there, tokens, strict=True)]

    def leave(self, sequence: S) -> None:
        """Free the slot. Work launched for the sequence may still run."""
        seat = self._seats.pop(sequence)
        seat.left = True
        self._free.append(seat.slot)

    def step(self, slots: Items[int], row: int, own: int | None = None) -> None:
        """Enqueue a step of these slots, with no token beyond `row`, and any pending changes in `slots`; nothing else.

        With `own`, the sequences share rows as `slots` was told to, and none has more than `own` rows besides.
        """
        rows = self._activate(slots)
        self._step(
            rows, context_limit(row), self.sampler.draw(slots), 0 if own is None else context_limit(own)
        )

    @torch.inference_mode()
    def logits(self, slots: Items[int], row: int) -> Tensor:
        """Return the logits [len(slots), vocab] that `step` would compute for these slots; nothing is sampled."""
        rows = self._activate(slots)
        return self.program.run(rows, context_limit(row))[: len(slots)].clone()

    def _activate(self, slots: Items[int]) -> int:
        """Make these the slots of the next step and return its number of rows."""
        rows = rows_for(len(slots))
        self.slots.activate(slots, rows)
        self._sent = self.slots.send()
        return rows

    def follow(self, step: DividedStep | DividedCheck) -> None:
        """Enqueue a step announced by the runner of rank 0."""
        self.slots.change(step.changes)
        draw = self.sampler.draw([])
        if isinstance(step, DividedStep):
            self._step(step.rows, step.limit, draw, step.own)
        else:
            assert isinstance(self._several, GuessedRows)
            self._several.plan(step.spans)
            self._run_several(self._several, step.rows, step.limit, draw)

    def _with_others(self, step: DividedStep | DividedCheck) -> AbstractContextManager[None]:
        return nullcontext() if self.together is None else self.together(step)

    @torch.inference_mode()
    def prepare(self, streams: int = 1) -> None:
        """Compile and record the steps of up to `streams` sequences. No slot may be taken yet.

        Steps of up to 8 rows are recorded for every context, larger ones for the usual contexts. Kernels for shared
        prefixes are only compiled, and recorded at their first use.
        """
        vocab, given = self.sampler.vocab_size, self.slots.given
        logits = torch.zeros(1, vocab, dtype=self.program.run(1, SMALLEST).dtype, device=self._every.device)
        largest = rows_for(min(streams, self.capacity))
        told = 0 if self.tells else None
        for params in (
            SamplingParams(temperature=0.0, logprobs=told),
            SamplingParams(top_k=20, logprobs=told),
        ):
            self.sampler.load(0, params, [], [], 0)
            draw = self.sampler.draw([0])
            self.sampler.sample(logits, self._every[:1], None, draw)  # as after a prompt
            for rows in {
                1,
                min(largest, 2 * FEW),
            }:  # settings that few use are only compiled, and recorded at their first use
                many = torch.zeros(rows, vocab, dtype=logits.dtype, device=logits.device)
                self.slots.activate([], rows)
                self.slots.send()
                self.sampler.sample(many, given.active[:rows], given.counters, DrawFeatures(draw.race))
            for rows in (rows for rows in ROWS if rows <= largest):
                self.slots.activate([], rows)
                self.slots.send()
                limit, most = SMALLEST, self.rows if rows <= FEW else min(self.rows, USUAL_CONTEXT)
                while True:
                    for _ in range(2 if self._graphs is not None else 1):
                        self._step(rows, limit, draw)
                    if limit >= most:
                        break
                    limit *= 2
            if (several := self._several) is not None:
                several.plan_nothing()
                for rows in self.counts:
                    self._run_several(several, rows, SMALLEST, draw)
        self._ahead = self._to_record()
        kv, limit = self.program.kv, context_limit(LEAST)
        for rows in (rows for rows in ROWS if FEW < rows <= largest and self.rows > LEAST):
            if kv is not None and choose_sharing(rows, kv.group) is not None:
                self.slots.activate([], rows)
                self.slots.send()
                self.program.run(rows, limit, SMALLEST)

    def _own_rows(self, seats: list[SlotState[S]]) -> int | None:
        """Decide which sequences share rows, if they changed since the last step; return the most unshared rows.

        Return None if none shares any.
        """
        if seats != self._together:
            self._together, self._shared = seats, []
            kv, rows = self.program.kv, rows_for(len(seats))
            sharing = choose_sharing(rows, kv.group) if kv is not None else None
            if kv is not None and sharing is not None:
                tables = [seat.sequence.table.blocks for seat in seats if seat.sequence.table is not None]
                shared, members = share(tables, [seat.row for seat in seats], kv, sharing)
                if any(shared):
                    self._shared = shared
                    self.slots.share(shared, members)
        if not self._shared:
            return None
        return max(seat.row - common for seat, common in zip(seats, self._shared, strict=True))

    def _step(self, rows: int, limit: int, draw: DrawFeatures, own: int = 0) -> None:
        with self._with_others(DividedStep(self._sent, rows, limit, own)):
            self._enqueue((rows, limit, draw, own), lambda: self._run(rows, limit, draw, own))

    def _compute(self, rows: int, limit: int, own: int) -> Tensor:
        """Enqueue the computation of a step's logits [rows, vocab]."""
        key = rows, limit, own

        @torch.inference_mode()
        def run() -> None:
            self._logits[key] = self.program.run(*key)

        with self._with_others(DividedStep(self._sent, *key)):
            self._enqueue(("logits", *key), run)
        return self._logits.pop(key) if self._graphs is None else self._logits[key]

    @torch.inference_mode()
    def _run(self, rows: int, limit: int, draw: DrawFeatures, own: int) -> None:
        given = self.slots.given
        logits = self.program.run(rows, limit, own)
        self.sampler.sample(logits, given.active[:rows], given.counters, draw)

    def _note(self, seats: list[SlotState[S]]) -> None:
        event = self._events.pop() if self._events else self._event()
        event.record()
        self._unread.append((event, [(seat, seat.token) for seat in seats]))


def make_decode_runner(
    network: Network,
    cache: KVCache,
    attention: str,
    rows: int,
    slots: int,
    graphs: Graphs | None,
    fused: bool,
    deterministic: bool = False,
    on_host: HostExperts | None = None,
    cuts: KernelConfigs | None = None,
) -> DecodeRunner[S]:
    """Make a runner on the GPU of `cache` for up to `slots` sequences (at most ROWS[-1]) of up to `rows` rows.

    `attention` names the backend; `on_host` computes the experts in host memory; `cuts` says how the fused kernels are
    cut (None: by the tables). Raises ImportError if triton is not installed.
    """
    from engine.execute.cuda.fused_program import FusedDecoder, unsupported
    from engine.execute.cuda.plain_program import PlainDecoder

    device = cache.device
    pdl = has_pdl(device)
    sampler = DeviceSampler(network.spec.vocab_size, slots, device, pdl)
    blocks = -(-rows // cache.block_size) + 1
    held = Slots(slots, rows_for(slots), blocks, sampler.token, cache.pools)
    given: StepInput = held.given
    if fused and unsupported(network) is None:
        program = FusedDecoder(network, cache, given, pdl, deterministic, on_host, cuts)
        checking = Checking(program, sampler, held, cache.block_size)
        return DecodeRunner(program, sampler, held, rows, graphs, torch.cuda.Event, checking)
    plain = PlainDecoder(network, cache, given, attention, on_host)
    return DecodeRunner(plain, sampler, held, rows, graphs, torch.cuda.Event)
