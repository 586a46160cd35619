"""The contract between the web API and the engine: what is asked, what comes back, and one protocol.

Nothing here knows torch or HTTP. The structures are msgspec's, so that the same definitions are what the channel
between the two processes sends and validates (the pieces are tagged: a union of them decodes by itself). All are
frozen, with slots, and cheap to make.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct

from chatterm.tool_calls.constraint import AnswerConstraint as AnswerConstraint
from chatterm.tool_calls.constraint import ToolFormat as ToolFormat

Role = Literal["system", "developer", "user", "assistant", "tool"]
Think = Literal["auto", "on", "off"]
Kind = Literal["reasoning", "answer"]
Reason = Literal["eos", "stop", "length", "context_full", "cancelled", "repetition"]
"""As engine.events.FinishReason."""


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model that can be asked; those that are not loaded are loaded on demand."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names that it is asked by."""
    created: int
    """Seconds since 1970: when its files were last changed; where there are none here, when it was loaded."""
    context_length: int | None
    """Tokens that one request may hold; None where it is not loaded and nobody knows."""
    thinks: bool | None = None
    """Whether its template knows thinking; None: not known before it is loaded."""
    chats: bool = True
    """Whether it has a chat template; else it completes text."""
    tool_format: ToolFormat | None = None
    """None: it cannot call tools, or that is not known before it is loaded."""
    file_bytes: int | None = None
    bytes: int | None = None
    """Of memory, while it is loaded."""
    loaded: bool = False
    expires_in_s: float | None = None
    """Until it is unloaded; None: never, or it is not loaded."""
    family: str = ""
    parameters: int | None = None
    format: str = ""
    """Of most of the weights: "BF16", "Q4_K", ..."""
    template: str = ""
    """The source of its chat template."""


class HistoryToolCall(Struct, frozen=True):
    """A call in the history. `arguments` is JSON text, as the client sent it."""

    id: str
    name: str
    arguments: str


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """One message of the history. Several in a row may have the same role."""

    role: Role
    content: str
    reasoning: str = ""
    """Of an assistant; templates know it as `reasoning_content`."""
    tool_calls: tuple[HistoryToolCall, ...] = ()
    """Of an assistant. Templates want the arguments as objects, so the service parses them; what is not JSON stays
    text."""
    tool_call_id: str | None = None
    """Of a tool's result."""
    name: str | None = None
    """Of the tool that gave this result, or of who says this."""


class Generation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for `count` answers. Exactly one of `messages` and `prompt` is given."""

    model: str
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    """A text that is completed as it is (control tokens in it count as such; a bos goes before it where the model wants
    one), or token ids."""
    count: int = 1
    sampling: Mapping[str, Any] = {}
    """Fields of SamplingParams that override the model's own defaults: temperature, top_p, top_k, min_p, seed, stop (a
    list), max_tokens, repetition_penalty, presence_penalty, frequency_penalty, logit_bias ({token id: bias}), logprobs
    (0 to 20: the drawn token's, and so many likeliest ones; absent: none). SamplingParams checks the values: a wrong
    one is a RequestError 400 of this name. Answer i of `count` has seed + i."""
    think: Think = "auto"
    template: Mapping[str, Any] = {}
    """More names for the chat template (chat_template_kwargs): `reasoning_effort`, ...; never `messages`, `tools`,
    `enable_thinking` or `add_generation_prompt`."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """As OpenAI's clients send them: {"type": "function", "function": {"name", "description", "parameters"}}. With
    tools, the marks of calls (`[TOOL_CALLS]`, `<|python_tag|>`, `<tool_call>`, `<|channel|>commentary to=functions.NAME
    ...<|message|>{json}<|call|>`) are in the answer's text, even where they are special tokens; without, they are not.
    Empty where tool_choice is "none"."""
    tool_choice: str = "auto"
    """"auto", "required", or the name of a function. The web API has made `constraint` of the latter two."""
    constraint: AnswerConstraint | None = None
    most_tokens: int | None = None
    """Of prompt and answer together, where that is less than the model's context. A longer prompt is a RequestError 400
    with code context_length_exceeded; the answer ends as "length". None: as many as the context holds."""
    deadline_s: float | None = None
    """Seconds from now after which it ends as "length"; None: no limit."""
    client: str = ""
    """Who asks, for fairness."""
    cache_key: str | None = None
    """A hint that requests with the same key begin alike."""
    keep_alive_s: float | None = None
    """How long the model stays loaded afterwards; 0: not at all, -1: for ever, None: as the server was started."""


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of one answer; times in seconds."""

    completion_tokens: int
    reasoning_tokens: int = 0
    load_s: float = 0.0
    """Until the model was loaded; 0 where it was."""
    queue_s: float = 0.0
    """Until the engine began with the prompt."""
    prefill_s: float = 0.0
    decode_s: float = 0.0


class TokenLogprob(Struct, frozen=True):
    """One token with the natural logarithm of its probability."""

    token_id: int
    text: str
    """What it stands for alone; half a character is U+FFFD."""
    raw: bytes
    """Its bytes."""
    logprob: float


class Logprob(Struct, frozen=True):
    """A drawn token, and the likeliest ones at its place (as many as were asked for)."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Started(Struct, frozen=True, tag="started"):
    """The prompt is computed: the first thing that comes, once for all answers."""

    model: str
    """The model's full name."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's tokens those that were in the cache."""
    tool_format: ToolFormat | None = None
    """How this model writes calls, for whoever did not know before it was loaded."""


class Delta(Struct, frozen=True, tag="delta", omit_defaults=True):
    """More of one answer: tokens of one kind, gathered for 15 ms at most, and longer where there are many streams.

    `text` may be empty (half a character).
    """

    index: int
    """Of the answer, from 0."""
    text: str
    kind: Kind
    token_ids: tuple[int, ...] = ()
    """Markers of thinking and the end of turn are among them."""
    logprobs: tuple[Logprob, ...] = ()
    """Of every token in `token_ids`, where they were asked for."""


class AnswerEnded(Struct, frozen=True, tag="ended"):
    """The last that comes of one answer. When all have ended the iterator does."""

    index: int
    reason: Reason
    usage: Usage


Piece = Started | Delta | AnswerEnded


class Latency(Struct, frozen=True):
    """How long something took lately, in seconds."""

    p50: float
    p99: float


class ModelMetrics(Struct, frozen=True, kw_only=True):
    """What the engine of one loaded model holds and has done since it was loaded. Counters only grow."""

    model: str
    running: int
    """Answers that the engine computes, for requests and for terminals."""
    waiting: int
    """Those that it has taken and not begun, and those that wait for their turn in the web process."""
    kv_usage: float
    """Share of the blocks that sequences hold, 0 to 1."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt tokens those that were found in the cache."""
    generated_tokens: int
    preemptions: int
    drafted_tokens: int | None = None
    """By speculation; None where there is none."""
    accepted_tokens: int | None = None
    weight_bytes: int = 0
    kv_bytes: int = 0
    preempted: int = 0
    """Answers that wait until there is room for them again."""
    users: int = 0
    """Requests and terminals that use it."""
    first_token: Latency | None = None
    """Time to first token of the latest answers; None where there are none."""
    between_tokens: Latency | None = None
    """Inter-token latency of the latest tokens."""


class Metrics(Struct, frozen=True, kw_only=True):
    """Of the engine process."""

    models: tuple[ModelMetrics, ...]
    terminals: int = 0
    """Terminals that are attached."""
    process_bytes: int = 0
    """Resident memory of the engine process."""


class RequestError(Exception):
    """A request that cannot be served. `message` is one line: what was wrong, then what to do next."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`status` is HTTP's; `kind` OpenAI's type: invalid_request_error, not_found_error, rate_limit_error,
        server_error; `code` OpenAI's: model_not_found, context_length_exceeded, ...; `param`: the field."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class Service(Protocol):
    """What answers. Methods belong to one event loop, and never block it."""

    @property
    def ready(self) -> bool:
        """Whether requests are answered: the engine process lives and is not shutting down."""

    def models(self) -> list[ServedModel]:
        """What can be asked, the loaded ones first; a moment old at most. Returns at once."""

    async def look(self) -> None:
        """See now what `models` tells. Raises RequestError."""

    def generate(
        self, request: Generation, finished: Callable[[], None] | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Started, then Deltas of all answers as they come, an Ended for each.

        `finished` is called once all have come, maybe before they are read.
        `aclose()` of the iterator cancels within one step. Raises RequestError, on its first step or, where the engine
        fails, on any: 404 code model_not_found; 400 code context_length_exceeded; 400 of a wrong value, tool or
        constraint; 503 when shutting down.
        """

    async def tokenize(self, model: str, text: str | tuple[ChatMessage, ...]) -> list[int]:
        """The tokens of a text (as `Generation.prompt`), or of a conversation with the generation prompt after it."""

    async def token_texts(self, model: str, ids: list[int]) -> list[str]:
        """What each token stands for. Raises RequestError 400 for an unknown id."""

    async def hold(self, model: str, keep_alive_s: float | None) -> None:
        """Load a model, if it is not, and keep it so long from now; 0: unload it, -1: for ever, None: as usual."""

    def watch(self, queued: Callable[[], Mapping[str, int]]) -> None:
        """`queued` tells how many answers of each model wait for their turn; `metrics` counts them as waiting."""

    async def metrics(self) -> Metrics: ...
