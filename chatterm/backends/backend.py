"""What screens and commands chat with: an engine here (local.py), one in another process (process.py), or a server
anywhere (remote/).

Two kinds of calls: those of the *worker* (they may block, and all come from one thread) and those of *anyone*
(they return at once). A screen therefore never waits for a model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from chatterm.backends.documents import Document
from chatterm.backends.exchange import Compaction, Exchange, Outcome, Tool, ToolCall, ToolResult
from engine.errors import ContextFullError, EngineError
from engine.events import (
    Chunk,
    DiskFigures,
    DraftCost,
    Figures,
    FinishReason,
    OffloadFigures,
    TokenEvent,
    TurnStats,
)
from engine.params import Constraint
from models.errors import ModelError
from models.progress import OnProgress, Progress

if TYPE_CHECKING:
    from engine.cache.block_map import BlockMap

__all__ = [
    "Attention",
    "Backend",
    "ChatOptions",
    "Chunk",
    "Compaction",
    "ContextFullError",
    "DiskFigures",
    "Document",
    "DraftCost",
    "EngineError",
    "Exchange",
    "Figures",
    "FinishReason",
    "Message",
    "ModelChoice",
    "ModelError",
    "ModelInfo",
    "OffloadFigures",
    "OnProgress",
    "Outcome",
    "Part",
    "Progress",
    "Request",
    "ThinkCache",
    "ThinkMode",
    "TokenEvent",
    "Tool",
    "ToolCall",
    "ToolResult",
    "TurnStats",
    "reading_text",
]

Attention = Literal["auto", "flash", "triton", "sdpa"]
Quantize = Literal["auto", "none", "int8", "int4"]
KVDtype = Literal["auto", "bf16", "fp16", "fp8", "int8"]
ThinkMode = Literal["auto", "on", "off"]
ThinkCache = Literal["exact", "mask"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a person chose for a chat; every default leaves the choice to the model or to the machine."""

    device: str = "auto"
    dtype: str = "auto"
    quantize: Quantize = "auto"
    kv_dtype: KVDtype = "auto"
    context: int | None = None
    """Tokens that the conversation may hold."""
    draft: str | None = None
    """The model that guesses what comes next; "auto": the catalogue's, where it is on this machine."""
    threads: int | None = None
    """Of a CPU; None: the physical cores, less one for the screen where there are more than two."""
    attention: Attention = "auto"
    graphs: bool = True
    """Whether a GPU decodes with CUDA graphs."""
    tune: bool = True
    """Whether a GPU's kernels run as was measured on it, and that is measured where it never was."""
    tensor_parallel: int = 1
    """GPUs that compute every layer together; 0: as few as have room for the model."""
    deterministic: bool = False
    """Whether a GPU, too, gives the same text whatever is cached or computed beside it."""
    streams: int = 1
    """Answers at once that the KV cache is made for, where the memory has room for them."""
    offload_gb: float | None = None
    """Host memory for what the KV cache of a GPU evicts."""
    disk_gb: float | None = None
    """Of disk for what conversations have cached; 0: none, None: a share of what is free."""
    kept_as: str | None = None
    """The name under which the cache of this conversation is kept on disk; None: it is not."""
    system: str | None = None
    documents: tuple[Document, ...] = ()
    """What the conversation begins with, behind the system prompt."""
    think: ThinkMode = "auto"
    think_cache: ThinkCache = "exact"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that override the model's own defaults."""
    constraint: Constraint | None = None
    """What every answer has to match."""
    tools: tuple[Tool, ...] = ()
    """What the model may ask for."""


ENGINE_OPTIONS = (
    "device",
    "dtype",
    "quantize",
    "kv_dtype",
    "context",
    "draft",
    "threads",
    "attention",
    "graphs",
    "tune",
    "tensor_parallel",
    "deterministic",
    "offload_gb",
    "disk_gb",
)
"""Fields of ChatOptions that an engine is loaded with: all conversations with it have the same. So they have `streams`,
which changes no answer. All other fields are of one conversation."""


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
    calls_tools: bool = False
    """Whether it knows tools."""
    is_remote: bool = False
    """It runs on a server: its cache and its tokens cannot be looked at. `device` is the server then, `dtype` is "",
    and `context_length` is 0 where the server does not tell."""
    resumes: frozenset[str] = frozenset({"nothing", "thinking", "text"})
    """What an answer may have come to for /continue to go on with it."""

    @property
    def label(self) -> str:
        """Its name without the address of its server, for places that show `where`, too."""
        return self.name.split("/", 3)[-1] if self.is_remote and "://" in self.name else self.name

    @property
    def where(self) -> str:
        """What it runs on, and in which numbers."""
        return " · ".join(part for part in (self.device, self.dtype) if part)


@dataclass(frozen=True, slots=True)
class Message:
    """What somebody said."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that is no part of the conversation."""

    messages: Sequence[Message]
    """A system message or none, then messages of the user and the assistant by turns; the first and the last are the
    user's."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that override those of the backend."""
    think: ThinkMode | None = None
    """None: as the backend does."""


Part = TokenEvent | Outcome | EngineError | ModelError
"""What comes of one of several prompts: an Outcome without a finish reason as it begins, its tokens, an Outcome with
one; an error in its place is the last, too."""


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
    server: str = ""
    """Where it runs, for people; "": here."""
    label: str = ""
    """Its name there, without the server; "": `name`."""
    context: int = 0
    """Tokens that a conversation with it may hold, where a server tells; else 0."""


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
    def system(self) -> str | None:
        """As the person wrote it, without the documents."""

    @property
    def documents(self) -> tuple[Document, ...]:
        """What the conversation begins with, behind the system prompt."""

    @property
    def think(self) -> ThinkMode: ...

    @property
    def think_cache(self) -> ThinkCache: ...

    def figures(self) -> Figures | None:
        """What the engine holds and does right now; None when there is nothing to tell."""

    def notes(self) -> Sequence[str]:
        """What the person should be told once."""

    def waiting(self, index: int = 0) -> str:
        """What a running answer waits for, in a few words, where that is not the model itself; else "". Of several
        answers at once it is the one with this number."""

    def blocks(self) -> "BlockMap | None":
        """The KV blocks as this conversation sees them, at most a moment old; None when there is nothing to tell."""

    def token_text(self, token_id: int) -> str | None:
        """What one token of the model stands for; None when there is no such token or no model."""

    def made_title(self) -> str | None:
        """What the model said when it was asked for a title, as it came; None while it has not."""

    def stop(self, but: int | None = None) -> None:
        """End the running answer; what was produced is kept. Nothing happens when none is running.

        Of candidates all end, or all `but` one.
        """

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

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        """Go on with what came of the calls of the last answer, one result each in their order. Raises as `send`."""

    def retry(self) -> Iterator[TokenEvent]:
        """Answer the last message once more."""

    def resume(self) -> Iterator[TokenEvent]:
        """Go on from exactly where the last answer ended, with the same tokens; the events are only what is new.

        Raises on the first `next()` when there is nothing to go on with (the answer is complete, the context is
        full); then the answer is unchanged. A stop string or half a character that had been shown may turn out
        differently: `last.text` is what counts in the end.
        """

    def candidates(self, text: str, count: int) -> Iterator[tuple[int, Part]]:
        """Answer `text` `count` times at once: what comes of each, with its number from 0.

        The history does not change; `load_path` makes one of them part of it. Raises as `send` does.
        """

    def compare(self, text: str, model: str, path: Sequence[Exchange]) -> Iterator[tuple[int, Part]]:
        """Answer `text`, which follows `path` (the history), and have `model` answer it at the same time: what comes
        of each, this one's as number 0. Otherwise as `candidates`."""

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        """Answer requests, many at once: what comes of each as it comes, with its number from 0.

        They are taken as they are needed. What is wrong with one is the last part of that one; what is raised ended
        them all. Closing the iterator ends them.
        """

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
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

    def set_documents(self, documents: Sequence[Document]) -> None:
        """Change what the conversation begins with; the history stays. An engine of ours reads it in idle time.

        Raises ContextFullError where no message would have room behind it, and changes nothing then.
        """

    def read(self, document: Document) -> int | None:
        """Have a document read in idle time, for conversations to come; how many tokens it has. None where nothing is
        kept that could be read before. Raises ContextFullError where it has no room in the context."""

    def set_think(self, think: ThinkMode) -> None: ...

    def set_think_cache(self, think_cache: ThinkCache) -> None:
        """What becomes of the thinking in the history, from the next message on."""

    def set_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Fields of SamplingParams that override the model's own defaults, instead of those that did until now.

        Raises EngineError for a value out of range, and changes nothing then.
        """

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """What the model may ask for from the next message on; () for nothing. An answer's calls are in its Outcome;
        while they are written their tokens are of the kind "call".

        Raises EngineError where the model knows no tools, and changes nothing then.
        """

    def know(self, exchanges: Sequence[Exchange]) -> None:
        """What was said elsewhere, latest first: an answer may repeat it, and where tokens are guessed these are looked
        at, too, instead of those of before. Nothing else comes of it."""

    def keep_as(self, name: str | None) -> None:
        """What the conversation has cached is kept on disk under this name from now on; None: it is not."""

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


def reading_text(figures: Figures | None) -> str:
    """That the prompt is read, and how far it is, for a narrow place."""
    if figures is None or not figures.prefill_total:
        return "reading"
    return f"reading · {100 * figures.prefill_done // figures.prefill_total}%"
