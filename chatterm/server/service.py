"""The contract between the web API and the engine: requests, results, and the Service protocol.

Nothing here depends on torch or HTTP. The structures are msgspec Structs, so that the same definitions are sent and
validated between the two processes (the pieces are tagged, so their union decodes without further hints). All are
frozen and cheap to make.
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
    """A model that can serve requests; one that is not loaded is loaded on demand."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for it."""
    created: int
    """Seconds since 1970: when its files were last changed, or when it was loaded if it has no files here."""
    context_length: int | None
    """Tokens that one request may have; None: unknown, as it is not loaded."""
    thinks: bool | None = None
    """Whether its template supports thinking; None: unknown until it is loaded."""
    chats: bool = True
    """Whether it has a chat template; otherwise it only completes text."""
    tool_format: ToolFormat | None = None
    """None: it cannot call tools, or this is unknown until it is loaded."""
    file_bytes: int | None = None
    bytes: int | None = None
    """Memory that it uses while it is loaded."""
    loaded: bool = False
    expires_in_s: float | None = None
    """Seconds until it is unloaded; None: never, or it is not loaded."""
    family: str = ""
    parameters: int | None = None
    format: str = ""
    """The format of most of the weights: "BF16", "Q4_K", ..."""
    template: str = ""
    """The source of its chat template."""


class HistoryToolCall(Struct, frozen=True):
    """A tool call in the history. `arguments` is JSON text, as the client sent it."""

    id: str
    name: str
    arguments: str


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """One message of the history. Several in a row may have the same role."""

    role: Role
    content: str
    reasoning: str = ""
    """An assistant's thinking; templates call it `reasoning_content`."""
    tool_calls: tuple[HistoryToolCall, ...] = ()
    """An assistant's calls. Templates want the arguments as objects, so the service parses them; invalid JSON stays
    text."""
    tool_call_id: str | None = None
    """The id of the call that a tool's result answers."""
    name: str | None = None
    """The name of the tool that gave this result, or of the speaker."""


class Generation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for `count` answers. Exactly one of `messages` and `prompt` is given."""

    model: str
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    """A text to be completed as it is (control tokens in it are recognised; a bos token is prepended if the model wants
    one), or token ids."""
    count: int = 1
    sampling: Mapping[str, Any] = {}
    """Fields of SamplingParams that override the model's own defaults: temperature, top_p, top_k, min_p, seed, stop (a
    list), max_tokens, repetition_penalty, presence_penalty, frequency_penalty, logit_bias ({token id: bias}), logprobs
    (0 to 20: the sampled token's, and this many of the likeliest; absent: none). `ignore_eos` is none of these: with it
    no token of the model ends an answer. SamplingParams checks the values: an
    invalid one raises RequestError 400 with its name. Answer i of `count` has seed + i."""
    think: Think = "auto"
    template: Mapping[str, Any] = {}
    """Other variables for the chat template (chat_template_kwargs): `reasoning_effort`, ...; never `messages`, `tools`,
    `enable_thinking` or `add_generation_prompt`."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's format: {"type": "function", "function": {"name", "description", "parameters"}}. With tools, the
    markers of calls (`[TOOL_CALLS]`, `<|python_tag|>`, `<tool_call>`, `<|channel|>commentary to=functions.NAME
    ...<|message|>{json}<|call|>`) are in the answer's text, even if they are special tokens; without, they are not.
    Empty if tool_choice is "none"."""
    tool_choice: str = "auto"
    """"auto", "required", or the name of a function. The web API turns the latter two into `constraint`."""
    constraint: AnswerConstraint | None = None
    most_tokens: int | None = None
    """The limit of prompt and answer together, if below the model's context. A longer prompt raises RequestError 400
    with code context_length_exceeded; an answer that reaches it ends as "length". None: the model's context."""
    deadline_s: float | None = None
    """Seconds from now after which it ends as "length"; None: no limit."""
    client: str = ""
    """Identifies the client, for fair scheduling."""
    cache_key: str | None = None
    """A hint that requests with the same key share a prefix."""
    keep_alive_s: float | None = None
    """Seconds that the model stays loaded afterwards; 0: not at all, -1: forever, None: the server's default."""

    @property
    def must_call(self) -> bool:
        """Whether the answer can only be calls of tools."""
        return bool(self.tools) and self.tool_choice != "auto"


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of one answer; times in seconds."""

    completion_tokens: int
    reasoning_tokens: int = 0
    load_s: float = 0.0
    """Time to load the model; 0 if it was loaded."""
    queue_s: float = 0.0
    """Time until the engine started on the prompt."""
    prefill_s: float = 0.0
    decode_s: float = 0.0


class TokenLogprob(Struct, frozen=True):
    """One token with the natural logarithm of its probability."""

    token_id: int
    text: str
    """Its text when decoded alone; part of a character becomes U+FFFD."""
    raw: bytes
    """Its bytes."""
    logprob: float


class Logprob(Struct, frozen=True):
    """A sampled token, and the likeliest ones at its position (as many as were requested)."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Started(Struct, frozen=True, tag="started"):
    """The first piece, once for all answers: the prompt has been computed."""

    model: str
    """The model's full name."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the cache."""
    tool_format: ToolFormat | None = None
    """How this model writes tool calls; may be unknown before it is loaded."""


class Delta(Struct, frozen=True, tag="delta", omit_defaults=True):
    """The next tokens of one answer, all of one kind, batched for at most 15 ms, or longer if there are many streams.

    `text` may be empty, as for part of a character.
    """

    index: int
    """The answer's number, from 0."""
    text: str
    kind: Kind
    token_ids: tuple[int, ...] = ()
    """Include the markers of thinking and the end of turn."""
    logprobs: tuple[Logprob, ...] = ()
    """One for each of `token_ids`, if they were requested."""


class AnswerEnded(Struct, frozen=True, tag="ended"):
    """The last piece of one answer. The iterator ends once all answers have."""

    index: int
    reason: Reason
    usage: Usage


Piece = Started | Delta | AnswerEnded


class Latency(Struct, frozen=True):
    """Percentiles of a recent latency, in seconds."""

    p50: float
    p99: float


class ModelMetrics(Struct, frozen=True, kw_only=True):
    """The state of one loaded model's engine, and its counters since the load, which only grow."""

    model: str
    running: int
    """Answers being computed, for requests and for terminals."""
    waiting: int
    """Answers queued in the engine, and those queued in the web process."""
    kv_usage: float
    """Share of the KV blocks that sequences hold, 0 to 1."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the cache."""
    generated_tokens: int
    preemptions: int
    drafted_tokens: int | None = None
    """Tokens drafted by speculation; None without speculation."""
    accepted_tokens: int | None = None
    weight_bytes: int = 0
    kv_bytes: int = 0
    preempted: int = 0
    """Preempted answers that wait for free KV blocks."""
    users: int = 0
    """Requests and terminals that use it."""
    busy_s: float = 0.0
    """Seconds since the step or job began that its loop is running; 0 while it has nothing to do."""
    first_token: Latency | None = None
    """Time to first token of the latest answers; None if there are none."""
    between_tokens: Latency | None = None
    """Inter-token latency of the latest tokens."""


class Metrics(Struct, frozen=True, kw_only=True):
    """Metrics of the engine process."""

    models: tuple[ModelMetrics, ...]
    terminals: int = 0
    """Attached terminals."""
    process_bytes: int = 0
    """Resident memory of the engine process."""


HEARD_S, BUSY_S = 10.0, 60.0
"""Seconds after which an engine process that does not answer, or a loop that is in the same step, counts as hung."""


class Health(Struct, frozen=True):
    """What is known of the engine process."""

    is_there: bool
    heard_s: float = 0.0
    """Seconds since the engine process has last answered."""
    busy_s: float = 0.0
    """Seconds for which a loaded model's loop has been in the same step or job."""

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be answered now; None: they can."""
        if not self.is_there:
            return "The engine process is not running; it is started again."
        if self.heard_s > HEARD_S:
            return f"The engine process has not answered for {self.heard_s:.0f} s."
        if self.busy_s > BUSY_S:
            return f"The engine has been in the same step for {self.busy_s:.0f} s."
        return None


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
        """`status` is HTTP's; `kind` is OpenAI's type: invalid_request_error, not_found_error, rate_limit_error,
        server_error; `code` is OpenAI's: model_not_found, context_length_exceeded, ...; `param` names the field."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class Service(Protocol):
    """Serves requests. Its methods belong to one event loop and never block it."""

    def health(self) -> "Health":
        """Return what is known of the engine process. Never waits."""

    def models(self) -> list[ServedModel]:
        """Return the available models, loaded ones first, from a list at most a moment old. Never waits."""

    async def look(self) -> None:
        """Refresh what `models` returns. Raises RequestError, 503 if the engine process does not answer soon."""

    def generate(
        self, request: Generation, finished: Callable[[], None] | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield Started, then the Deltas of all answers as they come, and an AnswerEnded for each.

        `finished` is called once all have arrived, possibly before they are read.
        `aclose()` of the iterator cancels within one step. Raises RequestError on the first step (or on any, if the
        engine fails): 404 with code model_not_found; 400 with code context_length_exceeded; 400 for an invalid value,
        tool or constraint; 503 when shutting down.
        """

    async def tokenize(self, model: str, text: str | tuple[ChatMessage, ...]) -> list[int]:
        """Return the token ids of a text (as `Generation.prompt`), or of a conversation plus the generation prompt."""

    async def token_texts(self, model: str, ids: list[int]) -> list[str]:
        """Return the text of each token. Raises RequestError 400 for an unknown id."""

    async def hold(self, model: str, keep_alive_s: float | None) -> None:
        """Load a model if needed and keep it for this long from now; 0: unload it, -1: forever, None: the default."""

    def watch(self, queued: Callable[[], Mapping[str, int]]) -> None:
        """Register `queued`, which returns the queued answers by model; `metrics` counts them as waiting."""

    async def metrics(self) -> Metrics:
        """Return the metrics; those of a moment ago if the engine process does not answer soon. Raises RequestError."""
