"""The interface between the front ends and a model: an engine in this process (local.py), an engine in another process
(process.py), or a server (remote/).

Methods are of two kinds. Methods of the *worker* may block and are all called from one thread; methods of *anyone*
return at once. A screen therefore never waits for a model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from chatterm.backends.documents import Document as Document
from chatterm.backends.exchange import Compaction as Compaction
from chatterm.backends.exchange import Exchange as Exchange
from chatterm.backends.exchange import Outcome as Outcome
from chatterm.backends.exchange import Tool as Tool
from chatterm.backends.exchange import ToolCall as ToolCall
from chatterm.backends.exchange import ToolResult as ToolResult
from engine.errors import ContextFullError as ContextFullError
from engine.errors import EngineError as EngineError
from engine.events import CachedChunk as CachedChunk
from engine.events import DiskFigures as DiskFigures
from engine.events import DraftCost as DraftCost
from engine.events import Figures as Figures
from engine.events import FinishReason as FinishReason
from engine.events import OffloadFigures as OffloadFigures
from engine.events import TokenEvent as TokenEvent
from engine.events import TurnStats as TurnStats
from engine.params import Constraint, LoadOptions
from models.errors import ModelError as ModelError
from models.progress import OnProgress as OnProgress
from models.progress import Progress as Progress

if TYPE_CHECKING:
    from engine.cache.block_map import BlockMap

ThinkMode = Literal["auto", "on", "off"]
ThinkCache = Literal["exact", "mask"]


@dataclass(frozen=True, slots=True)
class ChatOptions(LoadOptions):
    """The settings of a chat: how its model is loaded, and what belongs to the conversation."""

    kept_as: str | None = None
    """The name under which the cache of this conversation is kept on disk; None: it is not kept."""
    system: str | None = None
    """The system prompt as the user wrote it, without the documents."""
    documents: tuple[Document, ...] = ()
    """Documents placed behind the system prompt at the start of the conversation."""
    think: ThinkMode = "auto"
    think_cache: ThinkCache = "exact"
    """What happens to the thinking in the history."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that override the model's own defaults."""
    constraint: Constraint | None = None
    """A constraint that every answer must match."""
    tools: tuple[Tool, ...] = ()
    """Tools that the model may call. The calls of an answer are in its Outcome; tokens of a call have the kind "call"
    while it is written."""


class ConversationSettings(TypedDict, total=False):
    """Fields of ChatOptions that can change in a conversation. Those left out stay as they are."""

    system: str | None
    documents: tuple[Document, ...]
    think: ThinkMode
    think_cache: ThinkCache
    sampling: Mapping[str, Any]
    tools: tuple[Tool, ...]
    kept_as: str | None


ENGINE_OPTIONS = tuple(part.name for part in fields(LoadOptions) if part.name != "streams")
"""Fields of ChatOptions that an engine is loaded with, so that all of its conversations share them. They also share
`streams`, which changes no answer. All other fields belong to one conversation."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that answers."""

    name: str
    device: str
    dtype: str
    context_length: int
    """Size of the context, in tokens."""
    thinks: bool
    """Whether the model's chat template supports thinking."""
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Fields of SamplingParams that the model's authors recommend."""
    calls_tools: bool = False
    """Whether the model can call tools."""
    is_remote: bool = False
    """Whether the model runs on a server, so that its cache and tokens cannot be inspected. `device` is then the
    server, `dtype` is "", and `context_length` is 0 if the server does not report it."""
    resumes: frozenset[str] = frozenset({"nothing", "thinking", "text"})
    """What an answer may end in for /continue to be able to resume it."""

    @property
    def label(self) -> str:
        """The model's name without the server address, for places that also show `where`."""
        return self.name.split("/", 3)[-1] if self.is_remote and "://" in self.name else self.name

    @property
    def where(self) -> str:
        """The device and the dtype."""
        return " · ".join(part for part in (self.device, self.dtype) if part)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that is not part of the conversation."""

    messages: Sequence[Message]
    """An optional system message, then alternating user and assistant messages; the first and the last are the user's.
    """
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that override those of the backend."""
    think: ThinkMode | None = None
    """None: the backend's own mode."""


Part = TokenEvent | Outcome | EngineError | ModelError
"""An item of one of several answers: first an Outcome without a finish reason, then its tokens, then an Outcome with a
finish reason. An error takes the place of the last Outcome."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that can be chosen."""

    name: str
    """The name to pass to `switch`."""
    bytes: int | None
    """Size on disk, or of the download; None: unknown."""
    on_disk: bool
    fits: bool | None
    """Whether the weights and a short conversation fit in memory; None: unknown."""
    memory_bytes: int | None = None
    """Memory for the weights and a conversation of 4,096 tokens."""
    tokens_per_s: float | None = None
    """The expected decode speed on this machine; None: unknown."""
    int4_tokens_per_s: float | None = None
    """The expected decode speed with `--quantize int4`, if the model can be quantised so."""
    crawls: bool = False
    """Whether the model fits but is too slow to chat with."""
    server: str = ""
    """The server it runs on, as shown to people; "": this machine."""
    label: str = ""
    """The name of the model on its server, without the server; "": `name`."""
    context: int = 0
    """Size of the context in tokens, if a server reports it; otherwise 0."""


class Backend(Protocol):
    """A conversation with a model. Errors that the user can cause are ModelError and EngineError."""

    @property
    def model(self) -> str:
        """The name the user asked for; `info.name` once the model is loaded."""

    # --- anyone: these return at once ---

    @property
    def info(self) -> ModelInfo | None:
        """None until the model is loaded."""

    @property
    def last(self) -> Outcome | None:
        """The latest answer; None before the first. It is the running answer once that has its first token."""

    @property
    def used_tokens(self) -> int:
        """Context tokens taken by the history."""

    @property
    def options(self) -> ChatOptions:
        """The options as first given, with all changes since."""

    def figures(self) -> Figures | None:
        """Return what the engine holds and does right now; None if there is nothing to report."""

    def notes(self) -> Sequence[str]:
        """Return notes that the user should see once."""

    def waiting(self, index: int = 0) -> str:
        """Say in a few words what a running answer waits for, if it is not the model itself; otherwise return "".
        `index` selects one of several simultaneous answers.
        """

    def blocks(self) -> "BlockMap | None":
        """Return the KV blocks as this conversation sees them, at most a moment old; None if there is nothing to
        show.
        """

    def token_text(self, token_id: int) -> str | None:
        """Return the text of a token of the model; None if there is no such token or no model."""

    def made_title(self) -> str | None:
        """Return the title that the model was asked for, unedited; None until there is one."""

    def stop(self, but: int | None = None) -> None:
        """End the running answer and keep what was produced; do nothing if no answer is running.

        Of several candidates, end all, or all `but` one.
        """

    def answer_now(self) -> None:
        """End the thinking of the running answer; the same iterator goes on with the answer itself.

        Do nothing if the model is not thinking.
        """

    # --- the worker: these may block ---

    def open(self, on_progress: OnProgress | None = None) -> None:
        """Fetch and load the model. Raises ModelError or EngineError; a later `switch` may still succeed."""

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        """Continue with another model and an empty history. If the model cannot be found, the present one stays."""

    def send(self, text: str) -> Iterator[TokenEvent]:
        """Send a message. If it cannot be served, the first `next()` raises and the history is unchanged."""

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        """Continue with the results of the last answer's tool calls, one per call, in order. Raises as `send` does."""

    def resume(self) -> Iterator[TokenEvent]:
        """Continue the last answer from exactly where it ended, with the same tokens; yield only the new events.

        Raises on the first `next()` if the answer cannot be continued (it is complete, or the context is full); the
        answer is then unchanged. A stop string or half a character that was already shown may turn out differently: in
        the end, `last.text` is authoritative.
        """

    def candidates(self, text: str, count: int) -> Iterator[tuple[int, Part]]:
        """Answer `text` `count` times at once; yield the items of each answer with its number, from 0.

        The history does not change; `load_path` makes one of the answers part of it. Raises as `send` does.
        """

    def compare(self, text: str, model: str, path: Sequence[Exchange]) -> Iterator[tuple[int, Part]]:
        """Answer `text`, which follows `path` (the history), while `model` answers it too; yield the items of both.
        This backend's own answer is number 0. Otherwise as `candidates`.
        """

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        """Answer many requests at once; yield the items of each answer as they arrive, with its number, from 0.

        Requests are taken from the iterable as needed. An error of one request is the last item of that request; a
        raised error has ended all of them. Closing the iterator ends them too.
        """

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        """Replace the history with this path; [] empties it. The cache is warmed in idle time, without blocking.

        Token ids are kept if `exchange.model` is `info.name`; the text of another model is tokenised again.
        """

    def count(self, draft: str) -> DraftCost | None:
        """Return the cost of sending `draft`; None if no model is loaded."""

    def reset(self) -> None:
        """Forget the whole conversation except the system prompt."""

    def configure(self, settings: ConversationSettings) -> None:
        """Change settings of the conversation from the next message on; the history stays. A local engine reads
        documents in idle time.

        Raises EngineError, and changes nothing, for a sampling value out of range, for tools that the model does not
        support, and (ContextFullError) for documents that leave no room for a message.
        """

    def read(self, document: Document) -> int | None:
        """Read a document in idle time for later conversations; return its number of tokens, or None if there is no
        cache to read it into. Raises ContextFullError if it does not fit in the context.
        """

    def know(self, exchanges: Sequence[Exchange]) -> None:
        """Give the backend exchanges of other conversations, latest first, in place of earlier ones. An answer may
        repeat them, so speculation draws on them, too. They have no other effect.
        """

    def settle(self) -> None:
        """Warm the history in idle time, while the user reads. Returns at once."""

    def prepare(self, draft: str) -> None:
        """Warm `draft`, which the user is typing, in idle time. Returns at once."""

    def begin_title(self, question: str, answer: str) -> bool:
        """Have the model generate a title for the exchange if it is idle; `made_title` returns it.

        Returns at once. Generation ends as soon as anything else is asked for: call this again then. Returns False if
        the model is too small for titles.
        """

    def models(self) -> list[str]:
        """Return the names that `switch` takes without a download."""

    def has_loaded(self, model: str) -> bool:
        """Return whether `switch` takes this name because the server of this backend has loaded such a model. From any
        thread.
        """

    def catalogue(self) -> list[ModelChoice]:
        """Return the models that can be chosen: those on this machine, then the catalogue. Raises ModelError."""

    def close(self) -> None:
        """Free everything. The backend is unusable afterwards; closing twice is fine."""


def reading_text(figures: Figures | None) -> str:
    """Say in few characters that the prompt is being read, and how far."""
    if figures is None or not figures.prefill_total:
        return "reading"
    return f"reading · {100 * figures.prefill_done // figures.prefill_total}%"
