"""A sequence: one request on its way through the engine."""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from queue import SimpleQueue
from secrets import randbits
from sys import maxsize
from threading import Event
from time import perf_counter

from torch import Tensor

from engine.cache.block import Key
from engine.cache.block_table import BlockTable
from engine.cache.prefix_hit import PrefixHit
from engine.cache.rows import Rows
from engine.events import FinishReason, TokenEvent, TurnStats
from engine.params import SamplingParams
from engine.sampling.sampler import SamplerState, Words
from engine.schedule.channel_guide import ChannelGuide
from engine.schedule.guide import Guide, only
from engine.schedule.output import Output
from engine.schedule.repetition import repeats


class SequenceStatus(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It ran, lost its blocks to another sequence, and waits again."""
    FINISHED = "finished"


class Priority(IntEnum):
    """The priority of a sequence; lower values go first."""

    PERSON = 0
    IDLE = 1


@dataclass(frozen=True, slots=True)
class Owner:
    """The requester on whose behalf rows are computed."""

    follow: "Callable[[Sequence], None] | None" = None
    """Called with the sequence that computes them, so that it can be cancelled."""
    priority: Priority = Priority.PERSON
    origin: int = 0
    """The origin of the sequence."""


ANYBODY = Owner()
"""A person who waits until the rows are computed."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt to be made present in the KV cache, and (with `output`) to be answered.

    The loop thread owns it. Other threads may set `cancelled` and take from `events`; they read everything else only
    after `finished` is set, which is also when the end marker None comes out of `events`.
    """

    rows: Rows
    priority: Priority
    params: SamplingParams | None = None
    """None: the rows are only warmed."""
    output: Output | None = None
    sampler: SamplerState | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0
    """Its number in the scheduler's order of arrival."""
    client: Hashable = None
    """Who sent the request, for clients that may send many at once; None: the request stands alone."""
    since: int = maxsize
    """The first row that is needed in all groups of layers, whatever later rows see of it."""
    is_late: bool = False
    """Whether this is idle work that comes after other idle work."""
    turn: int = 0
    """Its number in the order in which clients take turns; requests of one client have different turns."""
    table: BlockTable | None = None
    joined: bool = False
    """Whether it has a slot of the decode runner."""
    logits: Tensor | None = None
    """Those of the last row of the prompt, if they are remembered and all its rows are present."""
    unread: int = 0
    """Tokens that were or will be drawn in the slot and that the host has not read."""
    preemptions: int = 0
    known: list[int] = field(default_factory=list)
    """Tokens of the answer whose rows were lost: they are drawn again, but not sent again."""
    events: SimpleQueue[TokenEvent | None] = field(default_factory=SimpleQueue)
    finished: Event = field(default_factory=Event)
    """Set at the end. The loop's own thread must not wait for it."""
    cancelled: bool = False
    """Setting it ends the sequence within one step."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    tail: str = ""
    """Text that was held back when the sequence was cut short."""
    prompt_tokens: int = 0
    origin: int = 0
    """Who had it computed: n for idle work of the n-th pause, -n for the request that ends it; 0: not recorded."""
    hit: PrefixHit = field(default_factory=PrefixHit)
    """The part of the prompt that was present when the sequence was first admitted."""
    reached: int = 0
    """How many rows were present when it ended or was preempted."""
    tried_again: int = -1
    """How many rows were present when the sequence last tried again because memory ran out; -1 if it never did."""
    generated: list[int] = field(default_factory=list)
    """The tokens of the answer, which are also the last ones of `rows`."""
    earlier: int = 0
    """How many of them it began with, as the continuation of an answer."""
    told: int = 1
    """How many tokens the last draw gave: the one drawn, and those that a constraint forced after it."""
    expected: int = -1
    """The token that speculation expects next; -1: none."""
    guessed: int = 0
    """The tokens of the answer that speculation guessed and the model checked."""
    accepted: int = 0
    """The guessed tokens that were right."""
    drafted: int = 0
    """The guessed tokens that came from a draft model."""
    drafts_accepted: int = 0
    """The draft model's tokens that were right."""
    saved_s: float = 0.0
    """The seconds saved compared with decoding token by token."""
    seed: int = 0
    """Together with the number of tokens generated, the state of sampling; random if the request gives none."""
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
        """The sort key for service: late idle work last, then by turn, then by arrival."""
        return self.is_late, self.turn, self.arrival

    @property
    def guide(self) -> Guide | ChannelGuide | None:
        """The guide that says which tokens may be sampled next; None: any."""
        return self.output.guide if self.output is not None else None

    @property
    def computed(self) -> int:
        """Rows whose KV is present."""
        table = self.table  # read once, because the loop may release the table while another thread asks
        return 0 if table is None else table.length

    @property
    def reusable(self) -> list[Key]:
        """The keys of the rows that need not be computed: the last one always is, if its logits are needed."""
        is_needed = self.params is not None and self.logits is None
        return self.rows.keys[:-1] if is_needed else self.rows.keys

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were present before the request."""
        return self.hit.rows - self.hit.own

    @property
    def pending(self) -> int:
        """Rows whose KV has yet to be computed."""
        return len(self.rows) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether only the tokens of the last draw have yet to be computed."""
        return 1 <= self.pending <= self.told and len(self.generated) - self.earlier >= self.pending

    @property
    def ending(self) -> FinishReason | None:
        """Why the answer ends with its newest token, though that does not end a turn; None if it goes on."""
        assert self.params is not None
        assert self.output is not None
        if self.output.stopped:
            return FinishReason.STOP
        if len(self.generated) == self.params.max_tokens:
            return FinishReason.LENGTH
        # Only new tokens count, so that an answer that is continued does not end again at once.
        if self.params.stop_repetition and repeats(self.generated, self.earlier):
            return FinishReason.REPETITION
        return None

    def allow(self, words: Words, drawn: int | None = None) -> None:
        """Write which tokens may follow the known answer, or `drawn`, if that token was drawn after it.

        Only for a sequence with a guide. A token that is drawn again is the only one allowed. Raises EngineError if the
        constraint cannot be followed.
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
        """Do what `allow` does for several rows: write which tokens may follow the newest one, and each guess after it.

        All of the answer is known, and each guess is allowed after the tokens before it (`permitted`).
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
        """Go back to the end of the rows present and decode again from there, so that every row gets the same bits."""
        count = max(self.computed + 1, self.prompt_tokens)
        self.known = self.rows.rewind(count) + self.known
        del self.generated[len(self.generated) - len(self.known) :]

    def catch_up(self) -> None:
        """Take back all tokens ever drawn, whether their rows are present or not."""
        self.rows.extend(self.known)
        self.generated += self.known
        self.known = []

    def stats(self) -> TurnStats:
        """Return the figures so far."""
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
