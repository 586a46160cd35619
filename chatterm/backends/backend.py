"""What screens and commands chat with: the local engine (local.py) today, a server in another process later.

Two kinds of calls: those of the *worker* (they may block, and all come from one thread) and those of *anyone*
(they return at once). A screen therefore never waits for a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.errors import ContextFullError, EngineError
from engine.events import DraftCost, Figures, FinishReason, SpillFigures, TokenEvent, TurnStats
from models.errors import ModelError
from models.progress import OnProgress, Progress

if TYPE_CHECKING:
    from chatterm.sessions.records import Exchange
    from engine.cache.block_map import BlockMap

__all__ = [
    "Attention",
    "Backend",
    "ChatOptions",
    "ContextFullError",
    "DraftCost",
    "EngineError",
    "Figures",
    "FinishReason",
    "ModelChoice",
    "ModelError",
    "ModelInfo",
    "OnProgress",
    "Outcome",
    "Progress",
    "SpillFigures",
    "ThinkCache",
    "ThinkMode",
    "TokenEvent",
    "TurnStats",
]

Attention = Literal["auto", "flash", "triton", "sdpa"]
Quantize = Literal["auto", "none", "int8", "int4"]
ThinkMode = Literal["auto", "on", "off"]
ThinkCache = Literal["exact", "mask"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a person chose for a chat; every default leaves the choice to the model or to the machine."""

    device: str = "auto"
    dtype: str = "auto"
    quantize: Quantize = "auto"
    context: int | None = None
    """Tokens that the conversation may hold."""
    threads: int | None = None
    """Of a CPU; None: the physical cores, less one for the screen where there are more than two."""
    attention: Attention = "auto"
    graphs: bool = True
    """Whether a GPU decodes with CUDA graphs."""
    spill_gb: float | None = None
    """Host memory for what the KV cache of a GPU evicts."""
    system: str | None = None
    think: ThinkMode = "auto"
    think_cache: ThinkCache = "exact"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that override the model's own defaults."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that answers."""

    name: str
    device: str
    dtype: str
    context_length: int
    """Tokens that the conversation may hold."""
    thinks: bool
    """Whether the model's chat template knows thinking."""
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Fields of SamplingParams that the model's authors recommend."""


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
class ModelChoice:
    """A model that a person can choose."""

    name: str
    """What `switch` takes."""
    bytes: int | None
    """On disk, or to download; None: unknown."""
    on_disk: bool
    fits: bool | None
    """Whether its weights and a short conversation fit in memory; None: unknown."""
    memory_bytes: int | None = None
    """What its weights and a conversation of 4,096 tokens take."""
    tokens_per_s: float | None = None
    """The decode speed to expect here; None: unknown."""
    int4_tokens_per_s: float | None = None
    """The same with `--quantize int4`, where that is possible."""
    crawls: bool = False
    """Whether it fits and is too slow to chat with."""


class Backend(Protocol):
    """One conversation with one model. Errors a person can cause are ModelError and EngineError."""

    @property
    def model(self) -> str:
        """What the person asked for; `info.name` once it is loaded."""

    # --- anyone: these return at once ---

    @property
    def info(self) -> ModelInfo | None:
        """None until the model is loaded."""

    @property
    def last(self) -> Outcome | None:
        """The latest answer; None before the first. Of the running one once its first token is out."""

    @property
    def used_tokens(self) -> int:
        """Tokens of the context that the history takes."""

    @property
    def system(self) -> str | None: ...

    @property
    def think(self) -> ThinkMode: ...

    @property
    def think_cache(self) -> ThinkCache: ...

    def figures(self) -> Figures | None:
        """What the engine holds and does right now; None when there is nothing to tell."""

    def blocks(self) -> "BlockMap | None":
        """The KV blocks as this conversation sees them, at most a moment old; None when there is nothing to tell."""

    def token_text(self, token_id: int) -> str | None:
        """What one token of the model stands for; None when there is no such token or no model."""

    def made_title(self) -> str | None:
        """What the model said when it was asked for a title, as it came; None while it has not."""

    def stop(self) -> None:
        """End the running answer; what was produced is kept. Nothing happens when none is running."""

    def answer_now(self) -> None:
        """End the thinking of the running answer: the same iterator goes on with the answer itself.

        Nothing happens when it is not thinking.
        """

    # --- the worker: these may block ---

    def open(self, on_progress: OnProgress | None = None) -> None:
        """Fetch and load the model. Raises ModelError or EngineError; then another `switch` may succeed."""

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        """Go on with another model and an empty history. If it cannot be found the present one stays."""

    def send(self, text: str) -> Iterator[TokenEvent]:
        """Ask. Raises on the first `next()` when it cannot be served; then the history is unchanged."""

    def retry(self) -> Iterator[TokenEvent]:
        """Answer the last message once more."""

    def resume(self) -> Iterator[TokenEvent]:
        """Go on from exactly where the last answer ended, with the same tokens; the events are only what is new.

        Raises on the first `next()` when there is nothing to go on with (the answer is complete, the context is
        full); then the answer is unchanged. A stop string or half a character that had been shown may turn out
        differently: `last.text` is what counts in the end.
        """

    def load_path(self, exchanges: "Sequence[Exchange]") -> None:
        """The history becomes this path; [] empties it. It is warmed in idle time, which this does not wait for.

        Token ids are kept where `exchange.model` is `info.name`; what another model said is tokenised from its text.
        """

    def count(self, draft: str) -> DraftCost | None:
        """What sending `draft` would take; None when no model is loaded."""

    def undo(self) -> bool:
        """Drop the last exchange; False when there is none."""

    def reset(self) -> None:
        """Forget the whole conversation but for the system prompt."""

    def set_system(self, system: str | None) -> None:
        """Change the system prompt; the history stays."""

    def set_think(self, think: ThinkMode) -> None: ...

    def set_think_cache(self, think_cache: ThinkCache) -> None:
        """What becomes of the thinking in the history, from the next message on."""

    def set_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Fields of SamplingParams that override the model's own defaults, instead of those that did until now.

        Raises EngineError for a value out of range, and changes nothing then.
        """

    def settle(self) -> None:
        """The person reads: warm the history in idle time. Returns at once."""

    def prepare(self, draft: str) -> None:
        """The person types `draft`: warm it in idle time. Returns at once."""

    def begin_title(self, question: str, answer: str) -> bool:
        """Have the model make a title for what was said, where nothing else is to be done now; `made_title` has it.

        Returns at once. It ends as soon as anything else is asked for: then begin again. False where the model is too
        small to be asked.
        """

    def models(self) -> list[str]:
        """Names that `switch` takes without a download."""

    def catalogue(self) -> list[ModelChoice]:
        """What can be chosen: the models on this machine, then those of the catalogue. Raises ModelError."""

    def close(self) -> None:
        """Free everything. The backend is of no use afterwards; closing twice is fine."""
