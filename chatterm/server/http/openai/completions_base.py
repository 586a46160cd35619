"""Shared by OpenAI's endpoints: fields of requests for answers, their conversion, and the rendering of chunks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from chatterm.server.http.answer_state import AnswerState, Totals
from chatterm.server.http.errors import error_object
from chatterm.server.http.fields import Ignored
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.common import (
    NamedTool,
    ResponseFormat,
    Strings,
    StructuredOutputs,
    ToolDefinition,
    given_sampling,
    parse_logit_bias,
    parse_stops,
    parse_tool_choice,
    parse_tools,
    strict_functions,
    usage_fields,
    with_tools,
)
from chatterm.server.http.sse import DONE, event
from chatterm.server.service import AnswerConstraint, Generation, RequestError, ServedModel

_SAMPLING = (
    *("seed", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop_repetition", "ignore_eos"),
)
MOST_ALTERNATIVES = 20


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionRequest(Struct, kw_only=True):
    """Fields of every request for an answer."""

    model: str
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


class CompletionsRequest(CompletionRequest, kw_only=True):
    """Fields of chats and of texts that are completed."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: Strings | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop_repetition: bool | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def sampling(given: CompletionsRequest, most: int | None, logprobs: int | None) -> dict[str, Any]:
    """Return the sampling fields, for `most` tokens with `logprobs` alternatives each. Raises RequestError 400."""
    found = given_sampling(given, _SAMPLING)
    others = {
        "stop": parse_stops(given.stop),
        "logit_bias": parse_logit_bias(given.logit_bias),
        "max_tokens": None
        if most == -1
        else most,  # LM Studio's and llama-server's clients write -1 for no limit
        "logprobs": logprobs,
    }
    return found | {name: value for name, value in others.items() if value is not None}


def usage_wanted(given: CompletionsRequest, ignored: Ignored) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether every chunk has it."""
    options = given.stream_options
    if options is None:
        return False, False
    if not given.stream:
        ignored.add("stream_options")
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def generation(given: CompletionRequest, limits: Limits, client: str, **asked: Any) -> Generation:
    """Build the Generation of a request; `asked` are further fields of it."""
    user = getattr(given, "safety_identifier", None) or given.user or ""
    return Generation(
        model=given.model,
        most_tokens=limits.context,
        deadline_s=limits.request_s,
        client=f"{client} {user}".rstrip(),
        cache_key=given.prompt_cache_key,
        **asked,
    )


def calling(
    given: Sequence[ToolDefinition],
    choice: str | NamedTool | None,
    parallel: bool | None,
    constraint: AnswerConstraint | None,
    model: ServedModel,
    ignored: Ignored,
) -> dict[str, Any]:
    """Return the fields of a Generation for the tools and the format of the answer. Raises RequestError 400."""
    tools = parse_tools(given)
    chosen = parse_tool_choice(choice, tools)
    tools = () if chosen == "none" else tools
    strict = strict_functions(given)
    bound = with_tools(constraint, model, tools, chosen, parallel is not False, ignored, strict)
    return {"tools": tools, "tool_choice": chosen, "constraint": bound}


@dataclass(slots=True, kw_only=True)
class CompletionsRenderer:
    """Renders the chunks of a stream, or one document of all answers."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    model: str
    id: str
    logprobs: bool
    with_usage: bool
    running_usage: bool
    """Whether every chunk has its usage."""
    created: int = field(default_factory=lambda: int(time.time()))
    _totals: Totals = field(default_factory=Totals)
    _head: bytes = b""

    def begin(self, totals: Totals) -> list[bytes]:
        self._totals = totals
        return []

    def end(self, states: Sequence[AnswerState], totals: Totals) -> list[bytes]:
        if not self.with_usage:
            return [DONE]
        return [event({**self._document(self.chunk_object, []), "usage": usage_fields(states, totals)}), DONE]

    def failed(self, error: RequestError) -> list[bytes]:
        return [event(error_object(error)), DONE]

    def whole(self, states: Sequence[AnswerState], totals: Totals) -> bytes:
        choices = [self._choice(state) for state in states]
        made = self._document(self.whole_object, choices)
        return msgspec.json.encode({**made, "usage": usage_fields(states, totals)})

    def _choice(self, state: AnswerState) -> dict[str, Any]:
        """Render a whole answer."""
        raise NotImplementedError

    def _chunk(self, state: AnswerState, choice: Mapping[str, Any]) -> bytes:
        """Render one event of an answer, which may be incomplete."""
        if not self._head:  # all chunks have the same beginning, up to their choice
            self._head = msgspec.json.encode(self._document(self.chunk_object, [])).removesuffix(b"]}")
        usage: dict[str, int] | None = None
        if self.running_usage:
            prompt = self._totals.prompt_tokens
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": state.tokens,
                "total_tokens": prompt + state.tokens,
            }
        last = b',"usage":%b' % msgspec.json.encode(usage) if self.running_usage or self.with_usage else b""
        return b"data: %b%b]%b}\n\n" % (self._head, msgspec.json.encode(choice), last)

    def _document(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }
