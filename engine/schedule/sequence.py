"""One request on its way through the engine."""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from queue import SimpleQueue
from secrets import randbits
from threading import Event
from time import perf_counter

from engine.cache.blocks import BlockTable
from engine.cache.prefix_hit import PrefixHit
from engine.cache.rows import Rows
from engine.events import FinishReason, TokenEvent, TurnStats
from engine.params import SamplingParams
from engine.sampling.sampler import SamplerState, Words
from engine.schedule.channel_guide import ChannelGuide
from engine.schedule.guide import Guide, only
from engine.schedule.output import Output


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It ran, lost its blocks to another one, and waits again."""
    FINISHED = "finished"


class Priority(IntEnum):
    """Who waits for it. Lower values go first."""

    PERSON = 0
    IDLE = 1


@dataclass(frozen=True, slots=True)
class Owner:
    """For whom rows are computed."""

    follow: "Callable[[Sequence], None] | None" = None
    """Gets the sequence that computes them, to cancel it."""
    priority: Priority = Priority.PERSON
    origin: int = 0
    """That of the sequence."""


ANYBODY = Owner()
"""A person who waits for them to the end."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt to be made present in the KV cache, and (with `output`) to be answered.

    The loop thread owns it. Other threads set `cancelled` and take from `events`; everything else they read
    only after `finished` is set (the end marker None comes out of `events` then too).
    """

    rows: Rows
    priority: Priority
    params: SamplingParams | None = None
    """None: the rows are only warmed."""
    output: Output | None = None
    sampler: SamplerState | None = None
    status: Status = Status.WAITING
    arrival: int = 0
    """The scheduler's number of it."""
    client: Hashable = None
    """Who asks, where one may ask for many at once; None: nobody else asks for this."""
    is_late: bool = False
    """Idle work that gives way to other idle work."""
    turn: int = 0
    """Clients take turns: the scheduler's number of this one. Of a client each has another."""
    table: BlockTable | None = None
    joined: bool = False
    """It has a slot of the decode runner."""
    unread: int = 0
    """Tokens that were drawn there, or will be, and that the host has not read."""
    preemptions: int = 0
    known: list[int] = field(default_factory=list)
    """Tokens of the answer whose rows were lost: they are drawn once more, and nobody is told again."""
    events: SimpleQueue[TokenEvent | None] = field(default_factory=SimpleQueue)
    finished: Event = field(default_factory=Event)
    """Nobody waits for it on the loop's own thread."""
    cancelled: bool = False
    """Whoever sets it ends the sequence within one step."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    tail: str = ""
    """Text that was held back when the sequence was cut short."""
    prompt_tokens: int = 0
    origin: int = 0
    """Who asks: n for idle work of the n-th pause, -n for the request that ends it; 0: nobody keeps count."""
    hit: PrefixHit = field(default_factory=PrefixHit)
    """What was present of the prompt when the sequence was admitted first."""
    reached: int = 0
    """How many rows were present when it ended, or was preempted."""
    generated: list[int] = field(default_factory=list)
    """The tokens of the answer; the last ones of `rows`."""
    earlier: int = 0
    """How many of them were there before: the sequence goes on with an answer."""
    told: int = 1
    """How many tokens the last draw gave: the one drawn, and those that a constraint forces after it."""
    expected: int = -1
    """The token that is guessed to be drawn next; -1: nobody does."""
    guessed: int = 0
    """Tokens that were guessed of the answer,"""
    accepted: int = 0
    """those of them that were right,"""
    drafted: int = 0
    drafts_accepted: int = 0
    """the same of those that a draft model guessed,"""
    saved_s: float = 0.0
    """and the seconds that this took less than decoding one by one."""
    seed: int = 0
    """With the number of tokens generated it is the state of sampling; drawn where the request gives none."""
    created: float = field(default_factory=perf_counter)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_tokens, self.earlier = len(self.rows), len(self.generated)
        given = self.params.seed if self.params is not None else None
        self.seed = randbits(63) if given is None else given

    @property
    def place(self) -> tuple[bool, int, int]:
        """Whose is smaller is served first: who has a sooner turn, and of these, who came first."""
        return self.is_late, self.turn, self.arrival

    @property
    def guide(self) -> Guide | ChannelGuide | None:
        """What may be sampled next; None: anything."""
        return self.output.guide if self.output is not None else None

    @property
    def computed(self) -> int:
        """Rows whose KV is present."""
        table = self.table  # looked at once: another thread may ask while the loop gives the table back
        return 0 if table is None else table.length

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were there before anybody waited for them."""
        return self.hit.rows - self.hit.own

    @property
    def pending(self) -> int:
        """Rows whose KV is yet to be computed."""
        return len(self.rows) - self.computed

    @property
    def decodes(self) -> bool:
        """What the last draw gave is all that is yet to be computed."""
        return 1 <= self.pending <= self.told and len(self.generated) - self.earlier >= self.pending

    def allow(self, words: Words, drawn: int | None = None) -> None:
        """Write which tokens may follow what is known of the answer, or `drawn`, which was drawn after it.

        Only for a sequence with a guide. Tokens that were told before are the only ones where they come again. Raises
        EngineError where the constraint cannot be followed.
        """
        guide, told_before = self.guide, self.known[int(drawn is not None) :]
        assert guide is not None
        if told_before:
            return only(words, told_before[0])
        guide.follow(self.generated)
        if drawn is not None:
            guide.push(self.known[0] if self.known else drawn)
        return guide.fill(words)

    def allow_each(self, words: Items[Words], guesses: Items[int]) -> None:
        """As `allow`, of several rows: which tokens may follow the newest one, and which each of the guesses after it.

        All of the answer is known, and each guess may follow what comes before it (`permitted`).
        """
        guide = self.guide
        assert guide is not None
        guide.follow(self.generated)
        guide.fill(words[0])
        if guesses:
            guide = guide.copy()
        for row, guess in zip(words[1:], guesses, strict=True):
            guide.push(guess)
            guide.fill(row)

    def rewind(self) -> None:
        """Go back to where the rows that are present end, to decode from there: so every row is what it was."""
        count = max(self.computed + 1, self.prompt_tokens)
        self.known = self.rows.rewind(count) + self.known
        del self.generated[len(self.generated) - len(self.known) :]

    def catch_up(self) -> None:
        """Have all tokens that were ever drawn, whether their rows are present or not."""
        self.rows.extend(self.known)
        self.generated += self.known
        self.known = []

    def stats(self) -> TurnStats:
        """The figures so far."""
        reached = self.first_token or perf_counter()
        return TurnStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prefilled_tokens=self.prompt_tokens - self.cached_tokens,
            generated_tokens=len(self.generated) - self.earlier,
            reasoning_tokens=self.output.reasoning_tokens if self.output else 0,
            ttft_s=reached - self.created if self.first_token else 0.0,
            prefill_s=reached - self.admitted if self.admitted else 0.0,
            decode_s=self.last_token - self.first_token if self.first_token else 0.0,
            warmed_tokens=self.hit.warmed,
            guessed_tokens=self.guessed,
            accepted_tokens=self.accepted,
            drafted_tokens=self.drafted,
            accepted_drafts=self.drafts_accepted,
            saved_s=self.saved_s,
        )
