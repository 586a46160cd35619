"""What every API has in common: what is asked, what is heard, and values that a server may have made up."""

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
"""What one message of a conversation is."""
_MOST = 2**40
"""No count of tokens is larger."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One request for one answer."""

    model: str
    messages: Sequence[Entry]
    """A system message or none, then the user's and the assistant's by turns, or what came of the assistant's calls.
    With `goes_on` the last is the beginning of the answer."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that were chosen; the server decides about the others."""
    think: ThinkMode = "auto"
    constraint: Constraint | None = None
    cache_key: str = ""
    """The same for every request of a conversation: its prompts go where their beginnings are cached."""
    context: int | None = None
    """Tokens to make room for, where a server asks."""
    goes_on: bool = False
    tools: Sequence[Tool] = ()
    """What the model may ask for."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """Those that messages of the user name, by digest."""


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """What a server says about one answer, in tokens; None where it does not."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """What one message of a stream says."""

    pieces: Sequence[AnswerPiece] = ()
    finish: FinishReason | None = None
    usage: ReportedUsage | None = None
    problem: str = ""
    """What went wrong there, as the server says it; the answer is over."""
    calls: Sequence[CallPart] = ()
    is_last: bool = False
    """Nothing comes after it."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that a server has."""

    name: str
    context_length: int = 0
    """0: it does not say."""
    server: str = ""
    """The kind of server, where it tells: vllm, sglang, llamacpp, chatterm, ..."""


class Dialect(Protocol):
    """One API. Everything is pure."""

    @property
    def path(self) -> str:
        """Behind the url of the server: where answers come from."""

    @property
    def models_path(self) -> str: ...

    @property
    def is_lines(self) -> bool:
        """A JSON document a line, and not server-sent events."""

    @property
    def unknown(self) -> Sequence[str]:
        """Fields of SamplingParams that it has no place for."""

    def body(self, asked: AnswerRequest, server: str) -> dict[str, Any]:
        """The request for a streamed answer; `server` as in Listed. Raises EngineError for what cannot be asked."""

    def heard(self, message: Mapping[str, Any]) -> ParsedMessage: ...

    def listed(self, document: Any) -> list[ListedModel] | None:
        """The models of a listing; None where it is none."""

    def can_go_on(self, server: str) -> bool:
        """Whether an answer that has begun can be continued there."""


OPTIONAL = ("prompt_cache_key", "stream_options", "chat_template_kwargs", "reasoning_effort", "include")
"""Fields of a request that an answer can do without: a server that refuses one is asked again without it."""


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
    """What an error message says, in whatever form; "" where it is none."""
    for name in ("error", "detail", "message"):
        value = message.get(name)
        if isinstance(value, dict):
            value = value.get("message") or value.get("type") or value.get("code") or "it did not say why"
        if isinstance(value, list) and value:  # as FastAPI says it
            value = mapping(value[0]).get("msg")
        if value:
            return str(value)[:2000]
    return ""


def schema_format(constraint: Constraint) -> dict[str, Any]:
    """A constraint as `response_format` has it. Raises EngineError for one that no API knows."""
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
    """With its text, or with another content."""
    return {"role": message.role, "content": message.content if content is None else content}


def seen(message: Message, pictures: Mapping[str, bytes]) -> tuple[str, list[tuple[str, str]]]:
    """The text of a message, and its pictures: of each its kind and its bytes in base64."""
    if message.role != "user":
        return message.content, []
    said, found = replace_pictures(message.content, pictures)
    return said, [(picture.kind, b64encode(pictures[picture.digest]).decode()) for picture in found]
