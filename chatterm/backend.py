"""What screens and commands chat with: the local engine (local.py) today, a server in another process later.

Two kinds of calls: those of the *worker* (they may block, and all come from one thread) and those of *anyone*
(they return at once). A screen therefore never waits for a model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.errors import ContextFullError, EngineError
from engine.events import Figures, FinishReason, TokenEvent, TurnStats
from models.errors import ModelError
from models.progress import OnProgress, Progress

__all__ = [
    "Attention",
    "Backend",
    "ChatOptions",
    "ContextFullError",
    "EngineError",
    "Figures",
    "FinishReason",
    "ModelError",
    "ModelInfo",
    "OnProgress",
    "Outcome",
    "Progress",
    "ThinkCache",
    "ThinkMode",
    "TokenEvent",
    "TurnStats",
]

Attention = Literal["auto", "flash", "triton", "sdpa"]
ThinkMode = Literal["auto", "on", "off"]
ThinkCache = Literal["exact", "mask"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a person chose for a chat; every default leaves the choice to the model or to the machine."""

    device: str = "auto"
    dtype: str = "auto"
    context: int | None = None
    """Tokens that the conversation may hold."""
    attention: Attention = "auto"
    graphs: bool = True
    """Whether a GPU decodes with CUDA graphs."""
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """The latest answer, whole or as far as it has come."""

    text: str
    reasoning: str
    finish_reason: FinishReason | None
    """None while the answer is running."""
    stats: TurnStats


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

    def figures(self) -> Figures | None:
        """What the engine holds and does right now; None when there is nothing to tell."""

    def stop(self) -> None:
        """End the running answer; what was produced is kept. Nothing happens when none is running."""

    # --- the worker: these may block ---

    def open(self, on_progress: OnProgress | None = None) -> None:
        """Fetch and load the model. Raises ModelError or EngineError; then another `switch` may succeed."""

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        """Go on with another model and an empty history. If it cannot be found the present one stays."""

    def send(self, text: str) -> Iterator[TokenEvent]:
        """Ask. Raises on the first `next()` when it cannot be served; then the history is unchanged."""

    def retry(self) -> Iterator[TokenEvent]:
        """Answer the last message once more."""

    def undo(self) -> bool:
        """Drop the last exchange; False when there is none."""

    def reset(self) -> None:
        """Forget the whole conversation but for the system prompt."""

    def set_system(self, system: str | None) -> None:
        """Change the system prompt; the history stays."""

    def set_think(self, think: ThinkMode) -> None: ...

    def settle(self) -> None:
        """The person reads: warm the history in idle time. Returns at once."""

    def prepare(self, draft: str) -> None:
        """The person types `draft`: warm it in idle time. Returns at once."""

    def models(self) -> list[str]:
        """Names that `switch` takes without a download."""

    def close(self) -> None:
        """Free everything. The backend is of no use afterwards; closing twice is fine."""
