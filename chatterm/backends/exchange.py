"""A message and its answer: the answer as a backend gives it, and the exchange that is shown, kept and sent again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.events import FinishReason, TokenEvent, TurnStats

NO_TOKEN = -1
"""The id of an event of a model that runs elsewhere: some text, of nobody knows which tokens."""
ResultState = Literal["done", "failed", "refused", "stopped"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may ask for."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """A JSON schema of its arguments, an object."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model asks for."""

    name: str
    arguments: str
    """JSON text as the model wrote it, whatever that is."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call, and what the model is told of it."""

    name: str
    arguments: str
    text: str
    state: ResultState = "done"
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The latest answer, whole or as far as it has come."""

    text: str
    reasoning: str
    finish_reason: FinishReason | None
    """None while the answer is running."""
    stats: TurnStats
    """Of the latest run: an answer that was continued has the figures of what was added."""
    token_ids: Sequence[int] = ()
    """Every token of the answer. While it runs this is the list that grows: copy what you keep."""
    shown: tuple[int, int] = (0, 0)
    """Which of `token_ids` the history shows; (0, 0) while it runs."""
    opening: Sequence[int] = ()
    """What the generation prompt put before the answer and the history leaves out."""
    seed: int | None = None
    """Of the random numbers: with the number of tokens it is the state of sampling. None: there is none to know."""
    ends_at: int | None = None
    """While it runs: the number of tokens at which `max_tokens` ends it, if anything does."""
    model: str = ""
    """Who gave it, where that is not the model of the conversation."""
    calls: Sequence[ToolCall] = ()
    """What it asks for, once it is over; `text` is without them."""

    def before(self, event: TokenEvent) -> "Outcome":
        """The answer as it was before `event`, its latest token."""
        text, reasoning = self.text, self.reasoning
        if event.kind == "reasoning":
            reasoning = reasoning[: len(reasoning) - len(event.text)]
        elif event.kind == "answer":
            text = text[: len(text) - len(event.text)]
        return replace(self, text=text, reasoning=reasoning, token_ids=list(self.token_ids[:-1]))


@dataclass(frozen=True, slots=True)
class Compaction:
    """What the model sees of everything up to an exchange, where that is not what was said."""

    summary: str | None = None
    """Stands for all of it but what is pinned; "": nothing does. None: it is all there."""
    without_files: bool = False
    """The attached files are left out."""


@dataclass(slots=True)
class Exchange:
    """A message of the person and the answer to it: one node of a session's tree."""

    id: int
    """Numbers of the session's own, from 1."""
    parent: int | None
    """The exchange it follows; None at the start of the conversation."""
    user: str
    text: str = ""
    """The answer, without its thinking."""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every token sampled, markers and end of turn included; ids of `model`."""
    shown: tuple[int, int] = (0, 0)
    """Which of `token_ids` the history shows."""
    opening: list[int] = field(default_factory=list)
    """What the generation prompt put before the answer and the history leaves out."""
    finish_reason: str | None = None
    """None while it runs; read back from the disk: it was cut off by a crash."""
    stats: dict[str, float] = field(default_factory=dict)
    """Fields of TurnStats."""
    model: str = ""
    created: float = 0.0
    """Seconds since the epoch."""
    thinking_s: float = 0.0
    seed: int | None = None
    """Of the random numbers: with the number of tokens it is the state of sampling."""
    ends_at: int | None = None
    """While it runs: the number of tokens at which `max_tokens` ends it, if anything does."""
    calls: list[ToolCall] = field(default_factory=list)
    """What the answer asks for."""
    results: list[ToolResult] = field(default_factory=list)
    """Where nobody wrote the message: what came of the calls of the exchange before. `user` says it in words."""
    is_pinned: bool = False
    """No compaction changes it."""
    compaction: Compaction | None = None
    """Of everything up to this exchange, on each branch that it is on; what was said stays."""

    def take(self, answer: Outcome) -> None:
        """The answer is this one, whole or as far as it has come."""
        self.text, self.reasoning = answer.text, answer.reasoning
        self.token_ids = [id for id in answer.token_ids if id != NO_TOKEN]
        self.shown, self.opening = answer.shown, list(answer.opening)
        self.stats = dict(answer.stats.to_dict())
        self.finish_reason = str(answer.finish_reason) if answer.finish_reason is not None else None
        self.seed, self.ends_at = answer.seed, answer.ends_at
        self.model = answer.model or self.model
        self.calls = list(answer.calls)

    def add(self, events: Iterable[TokenEvent]) -> None:
        """The next tokens of the answer."""
        text, reasoning = [self.text], [self.reasoning]
        for event in events:
            if event.token_id != NO_TOKEN:
                self.token_ids.append(event.token_id)
            if event.kind != "call":
                (reasoning if event.kind == "reasoning" else text).append(event.text)
        self.text, self.reasoning = "".join(text), "".join(reasoning)
