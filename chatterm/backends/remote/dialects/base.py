"""The parts common to every API: requests, parsed messages, and checks of a server's values, which are not trusted."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chatterm.backends.backend import EngineError, FinishReason, Message, ThinkMode, Tool
from chatterm.backends.pictures import replace_pictures
from chatterm.backends.remote.dialects.calls import CallingMessage, CallPart, CallResult
from chatterm.backends.remote.thinking import AnswerPiece
from engine.params import Constraint

Entry = Message | CallingMessage | CallResult
"""A message of a conversation."""
_MOST = 2**40
"""The largest count of tokens that is believed."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request for one answer."""

    model: str
    messages: Sequence[Entry]
    """An optional system message, then alternating user and assistant messages, or results of the assistant's calls.
    With `goes_on`, the last is the beginning of the answer."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of SamplingParams that were chosen; the server decides the others."""
    think: ThinkMode = "auto"
    constraint: Constraint | None = None
    cache_key: str = ""
    """The same for every request of a conversation: servers route them to the cache that has its beginning."""
    context: int | None = None
    """Size of the context in tokens, for servers that must be told."""
    goes_on: bool = False
    tools: Sequence[Tool] = ()
    """Tools that the model may call."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """Pictures that the user's messages name, by digest."""


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """The token counts of an answer as a server reports them; None: not reported."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """The contents of one message of a stream."""

    pieces: Sequence[AnswerPiece] = ()
    finish: FinishReason | None = None
    usage: ReportedUsage | None = None
    problem: str = ""
    """The server's own error message; it ends the answer."""
    calls: Sequence[CallPart] = ()
    is_last: bool = False
    """Whether nothing comes after it."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that a server lists."""

    name: str
    context_length: int = 0
    """Size of the context in tokens; 0: not reported."""
    server: str = ""
    """The kind of server, if it says so: vllm, sglang, llamacpp, chatterm, ..."""


class Dialect(Protocol):
    """The interface of one API. Everything is pure."""

    @property
    def path(self) -> str:
        """The path that answers come from, below the URL of the server."""

    @property
    def models_path(self) -> str: ...

    @property
    def is_lines(self) -> bool:
        """Whether it streams one JSON document per line instead of server-sent events."""

    @property
    def unknown(self) -> Sequence[str]:
        """Fields of SamplingParams that the API does not have."""

    def body(self, asked: AnswerRequest, server: str) -> dict[str, Any]:
        """Return the request for a streamed answer; `server` as in ListedModel. Raises EngineError if unsupported."""

    def heard(self, message: Mapping[str, Any]) -> ParsedMessage: ...

    def listed(self, document: Any) -> list[ListedModel] | None:
        """Return the models of a listing; None if it is not one."""

    def can_go_on(self, server: str) -> bool:
        """Return whether an answer that has begun can be continued there."""


OPTIONAL = ("prompt_cache_key", "stream_options", "chat_template_kwargs", "reasoning_effort", "include")
"""Optional fields of a request: if a server rejects one, the request is repeated without it."""


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def count(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
    return int(value) if is_count else None  # type: ignore[call-overload]


def complaint(message: Mapping[str, Any]) -> str:
    """Return the text of an error message, whatever its form; "" if it is none."""
    for name in ("error", "detail", "message"):
        value = message.get(name)
        if isinstance(value, dict):
            value = value.get("message") or value.get("type") or value.get("code") or "it did not say why"
        if isinstance(value, list) and value:  # the form of FastAPI
            value = mapping(value[0]).get("msg")
        if value:
            return str(value)[:2000]
    return ""


def schema_format(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as `response_format`. Raises EngineError if no API supports its kind."""
    import json

    if constraint.kind == "json_object":
        return {"type": "json_object"}
    if constraint.kind == "json_schema":
        try:
            schema = json.loads(constraint.text)
        except ValueError as error:
            raise EngineError(f"The JSON schema is not valid JSON: {error}.") from None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    raise EngineError(
        "Remote models do not support --regex; use --schema or --json-object, or a model on this machine."
    )


def to_message(message: Message, content: object = None) -> dict[str, Any]:
    """Convert a message, with its text or with other content."""
    return {"role": message.role, "content": message.content if content is None else content}


def seen(message: Message, pictures: Mapping[str, bytes]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a message, and the media type and base64 data of each of its pictures."""
    if message.role != "user":
        return message.content, []
    said, found = replace_pictures(message.content, pictures)
    return said, [(picture.kind, b64encode(pictures[picture.digest]).decode()) for picture in found]
