"""A draft model on a GPU: as in `drafting.py`, but the device draws all tokens of a chain, one after the other.

The host reads them only after the last one is drawn. So the length of a chain is decided before its first token, by how
sure the model has been lately. Only whole chains can be timed. What a chain takes besides its steps, such as the time
in which the host starts it and reads its tokens, follows from chains of different lengths.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import median
from time import perf_counter

from engine.cache.block_table import BlockTable
from engine.execute.cuda.draft_runner import Chain, DraftRunner
from engine.execute.cuda.verify import DraftStart
from engine.kernels.recording import wait_for
from engine.params import SamplingParams
from engine.sampling.sampler import SampledToken
from engine.schedule.drafting import Drafting, ReadProgress
from engine.schedule.idle_pace import IdlePace
from engine.speculation.sources import NOTHING, DraftRequest, Drawing, GoesOn, Guess

FIRST_READ = 512
"""The rows of a text that are read at once, before their time has been measured."""
COMPARED = 32
"""The latest chains that are compared by length."""
OFTEN = 3
"""Chains of a length that are needed for this."""
LONGER = 3
"""Tokens by which every other chain is longer until chains could be compared."""
GREEDY = Drawing(SamplingParams(temperature=0.0), 0, 0)
"""How to draw guesses for a text that gives no `Drawing`."""


@dataclass(slots=True)
class PreparedSlot:
    """A slot, and the block table that it was prepared for."""

    slot: int
    table: BlockTable


@dataclass(slots=True)
class ChainTime:
    """The seconds that a chain takes besides its steps."""

    start_s: float | None = None
    """None: unknown."""
    _texts: int = 0
    """In how many texts the latest chains drafted."""
    _latest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=COMPARED))
    """Lengths and seconds of the latest chains."""

    def saw(self, texts: int, length: int, seconds: float) -> None:
        """Record the seconds of a chain of `length` steps, each for `texts` texts."""
        if texts != self._texts:
            self._texts = texts
            self._latest.clear()
        self._latest.append((length, seconds))
        seen = dict[int, list[float]]()
        for count, took in self._latest:
            seen.setdefault(count, []).append(took)
        often = sorted((count, median(took)) for count, took in seen.items() if len(took) >= OFTEN)
        if len(often) > 1:
            (few, least), (many, most) = often[0], often[-1]
            self.start_s = min(max(least - few * (most - least) / (many - few), 0.0), least)

    def split(self, length: int, seconds: float) -> tuple[float, float]:
        """Split the seconds of a chain of `length` steps: return those besides the steps, and those of a step."""
        start_s = min(self.start_s or 0.0, seconds)
        return start_s, (seconds - start_s) / length


@dataclass(slots=True, kw_only=True)
class SlotDrafting(Drafting):
    """Implements `Source`."""

    decode_runner: DraftRunner
    pace: IdlePace = field(default_factory=lambda: IdlePace(FIRST_READ))
    sure: float = 0.8
    """Moving average of the probability that the model gave its own tokens."""
    time: ChainTime = field(default_factory=ChainTime)
    _chains: int = 0
    """Chains so far."""
    _places: dict[Hashable, PreparedSlot] = field(default_factory=dict)
    """Places by text, least recently used first."""

    def guess(
        self, asked: Sequence[DraftRequest], goes_on: GoesOn, saw: Callable[[int, float], None]
    ) -> list[Guess]:
        self._let_go()
        guesses = [NOTHING] * len(asked)
        there = self._all_caught_up(asked)
        counts = {at: self._count(at, asked[at].most, len(there), goes_on) for at in there}
        # A step in slots leaves the state after its first row.
        going = [at for at, count in counts.items() if count and self._plan(there[at], 1)]
        if not going:
            return guesses
        self._chains += 1
        began, firsts = perf_counter(), self.decode_runner.firsts
        whom = {asked[at].whom for at in going}
        spare = dict(zip(going, self.guess_states or (), strict=False))
        chains = [
            Chain(self._start(asked[at], there[at], whom), there[at].table, counts[at], spare.get(at))
            for at in going
        ]
        for at, drawn in zip(going, self.decode_runner.chain(chains), strict=True):
            reading, tokens = there[at], asked[at].tokens
            guesses[at] = self._guessed(asked[at], drawn)
            self.blocks.commit(reading.table, tokens[reading.table.length :])
            reading.ahead = list(guesses[at].tokens[:-1])
        if self.decode_runner.firsts == firsts:
            longest, seconds = max(counts.values()), perf_counter() - began
            self.time.saw(len(going), longest, seconds)
            start_s, each = self.time.split(longest, seconds)
            saw(0, start_s)
            for _ in range(longest):
                saw(len(going), each)
        return guesses

    def end(self, whom: Hashable) -> None:
        self._places.pop(whom, None)
        Drafting.end(self, whom)

    def while_idle(self) -> bool:
        return Drafting.while_idle(self) or self.decode_runner.while_idle()

    def _count(self, at: int, most: int, texts: int, goes_on: GoesOn) -> int:
        """Return how many tokens to guess, assuming that the model stays as sure as it was."""
        guess = NOTHING
        while len(guess.tokens) < most and goes_on(at, guess, texts):
            guess = Guess((*guess.tokens, 0), chances=(*guess.chances, self.sure))
        count = len(guess.tokens)
        if count and self.time.start_s is None and self._chains % 2:
            return min(count + LONGER, most)
        return count

    def _start(self, asked: DraftRequest, reading: ReadProgress, going: set[Hashable]) -> DraftStart:
        """Prepare a slot for a chain and return where the chain begins. The texts in `going` keep their slots."""
        tokens, drawing = asked.tokens, asked.drawing or GREEDY
        place = self._places.pop(asked.whom, None)
        is_new = place is None or place.table is not reading.table
        if is_new:
            place = PreparedSlot(self._free_slot(going) if place is None else place.slot, reading.table)
            self.decode_runner.begin(place.slot)
        assert place is not None
        self._places[asked.whom] = place
        if is_new or drawing.params.penalises:
            split = len(tokens) - drawing.said
            self.decode_runner.load(place.slot, drawing.params, tokens[:split], tokens[split:], drawing.seed)
        return DraftStart(place.slot, tokens[reading.table.length :], reading.table.length, drawing.said)

    def _free_slot(self, going: set[Hashable]) -> int:
        taken = {place.slot for place in self._places.values()}
        free = next((slot for slot in range(self.decode_runner.capacity) if slot not in taken), None)
        if free is not None:
            return free
        return self._places.pop(next(whom for whom in self._places if whom not in going)).slot

    def _guessed(self, asked: DraftRequest, drawn: list[SampledToken]) -> Guess:
        """Return the guess for the tokens drawn after the text of `asked`, and update `sure`."""
        chances = tuple(exp(min(token.logprob or 0.0, 0.0)) for token in drawn)
        self.sure += (sum(chances) / len(chances) - self.sure) / 16
        return Guess(tuple(token.token_id for token in drawn), chances=chances)

    def _wait(self) -> None:
        wait_for(self.decode_runner.slots.given.active.device)
