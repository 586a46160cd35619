"""A message and its answer: the answer as a backend gives it, and the exchange that is shown, kept and sent again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.events import FinishReason, TokenEvent, TurnStats


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

    def before(self, event: TokenEvent) -> "Outcome":
        """The answer as it was before `event`, its latest token."""
        text, reasoning = self.text, self.reasoning
        if event.kind == "reasoning":
            reasoning = reasoning[: len(reasoning) - len(event.text)]
        else:
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
    is_pinned: bool = False
    """No compaction changes it."""
    compaction: Compaction | None = None
    """Of everything up to this exchange, on each branch that it is on; what was said stays."""

    def take(self, answer: Outcome) -> None:
        """The answer is this one, whole or as far as it has come."""
        self.text, self.reasoning = answer.text, answer.reasoning
        self.token_ids = list(answer.token_ids)
        self.shown, self.opening = answer.shown, list(answer.opening)
        self.stats = dict(answer.stats.to_dict())
        self.finish_reason = str(answer.finish_reason) if answer.finish_reason is not None else None
        self.seed, self.ends_at = answer.seed, answer.ends_at

    def add(self, events: Iterable[TokenEvent]) -> None:
        """The next tokens of the answer."""
        text, reasoning = [self.text], [self.reasoning]
        for event in events:
            self.token_ids.append(event.token_id)
            (reasoning if event.kind == "reasoning" else text).append(event.text)
        self.text, self.reasoning = "".join(text), "".join(reasoning)
