"""A message and its answer: the answer as a backend returns it, and the exchange that is shown, saved and sent
again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.events import FinishReason, TokenEvent, TurnStats

NO_TOKEN = -1
"""The token id of an event from a remote model, whose tokens are unknown."""
ResultState = Literal["done", "failed", "refused", "stopped"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""

    def as_function(self) -> dict[str, Any]:
        """Return the tool as chat completions, Ollama and chat templates take it, the same to the byte each time."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model."""

    name: str
    arguments: str
    """The JSON text as the model wrote it, valid or not."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call, as the model receives it."""

    name: str
    arguments: str
    text: str
    state: ResultState = "done"
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The latest answer, complete or so far."""

    text: str
    reasoning: str
    finish_reason: FinishReason | None
    """None while the answer is running."""
    stats: TurnStats
    """Statistics of the latest run: for a continued answer, those of the added part."""
    token_ids: Sequence[int] = ()
    """Every token of the answer. While it runs, this is the list that grows: copy what you keep."""
    shown: tuple[int, int] = (0, 0)
    """The range of `token_ids` that the history shows; (0, 0) while the answer runs."""
    opening: Sequence[int] = ()
    """What the generation prompt put before the answer and the history leaves out."""
    seed: int | None = None
    """The seed of the random numbers: together with the number of tokens it is the state of sampling. None: unknown."""
    ends_at: int | None = None
    """While the answer runs: the number of tokens at which `max_tokens` ends it; None if it does not."""
    model: str = ""
    """The model that gave the answer, if it is not the model of the conversation."""
    calls: Sequence[ToolCall] = ()
    """The tool calls of a finished answer; `text` does not contain them."""

    def before(self, event: TokenEvent) -> "Outcome":
        """Return the answer as it was before `event`, its latest token."""
        text, reasoning = self.text, self.reasoning
        if event.kind == "reasoning":
            reasoning = reasoning[: len(reasoning) - len(event.text)]
        elif event.kind == "answer":
            text = text[: len(text) - len(event.text)]
        return replace(self, text=text, reasoning=reasoning, token_ids=list(self.token_ids[:-1]))


@dataclass(frozen=True, slots=True)
class Compaction:
    """A change to what the model sees of all exchanges up to a certain one."""

    summary: str | None = None
    """A summary that stands for everything not pinned; "": nothing stands for it. None: everything is kept."""
    without_files: bool = False
    """Whether attached files are left out."""


@dataclass(slots=True)
class Exchange:
    """A user message and the answer to it: one node of a session's tree."""

    id: int
    """The number of the exchange in its session, from 1."""
    parent: int | None
    """The exchange that this one follows; None at the start of the conversation."""
    user: str
    text: str = ""
    """The answer without its thinking."""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every sampled token, including markers and end of turn; ids of `model`."""
    shown: tuple[int, int] = (0, 0)
    """The range of `token_ids` that the history shows."""
    opening: list[int] = field(default_factory=list)
    """What the generation prompt put before the answer and the history leaves out."""
    finish_reason: str | None = None
    """None while the answer runs. In an exchange read from disk, None means that a crash cut the answer off."""
    stats: dict[str, float] = field(default_factory=dict)
    """Fields of TurnStats."""
    model: str = ""
    created: float = 0.0
    """Seconds since the epoch."""
    thinking_s: float = 0.0
    seed: int | None = None
    """The seed of the random numbers: together with the number of tokens it is the state of sampling."""
    ends_at: int | None = None
    """While the answer runs: the number of tokens at which `max_tokens` ends it; None if it does not."""
    calls: list[ToolCall] = field(default_factory=list)
    """The tool calls of the answer."""
    results: list[ToolResult] = field(default_factory=list)
    """If the message is not the user's: the results of the previous exchange's calls. `user` states them in words."""
    is_pinned: bool = False
    """Whether compaction leaves the exchange unchanged."""
    compaction: Compaction | None = None
    """The compaction of everything up to this exchange, on each branch that contains it; the original text is kept."""

    def take(self, answer: Outcome) -> None:
        """Take over an answer, complete or so far."""
        self.text, self.reasoning = answer.text, answer.reasoning
        self.token_ids = [id for id in answer.token_ids if id != NO_TOKEN]
        self.shown, self.opening = answer.shown, list(answer.opening)
        self.stats = dict(answer.stats.to_dict())
        self.finish_reason = str(answer.finish_reason) if answer.finish_reason is not None else None
        self.seed, self.ends_at = answer.seed, answer.ends_at
        self.model = answer.model or self.model
        self.calls = list(answer.calls)

    def add(self, events: Iterable[TokenEvent]) -> None:
        """Append the next tokens of the answer."""
        text, reasoning = [self.text], [self.reasoning]
        for event in events:
            if event.token_id != NO_TOKEN:
                self.token_ids.append(event.token_id)
            if event.kind != "call":
                (reasoning if event.kind == "reasoning" else text).append(event.text)
        self.text, self.reasoning = "".join(text), "".join(reasoning)
