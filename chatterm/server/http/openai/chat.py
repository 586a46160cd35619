"""/v1/chat/completions: parses requests and renders answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from msgspec import Struct

from chatterm.server.http.answer_state import AnswerState, Finished, Likelihoods, Part, Thought
from chatterm.server.http.fields import Ignored, Table, TokenCount, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.common import (
    ChatMessagePart,
    ToolDefinition,
    given_functions,
    named_tool,
    new_id,
    openai_finish_reason,
    parse_constraint,
    parse_count,
    parse_messages,
    thinking,
)
from chatterm.server.http.openai.completions_base import (
    MOST_ALTERNATIVES,
    CompletionsRenderer,
    CompletionsRequest,
    calling,
    generation,
    sampling,
    usage_wanted,
)
from chatterm.server.http.openai.refused import REFUSED
from chatterm.server.http.renderer import ParsedRequest
from chatterm.server.service import Logprob, ServedModel, Think, TokenLogprob
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """As OpenRouter's clients write them."""

    effort: str | None = None
    enabled: bool | None = None


class ThinkingOptions(Struct, forbid_unknown_fields=True):
    """As the clients of GLM and DeepSeek write them."""

    type: Literal["enabled", "disabled", "auto"]


class ChatRequest(CompletionsRequest, kw_only=True):
    """A request to /v1/chat/completions."""

    messages: list[ChatMessagePart]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: TokenCount | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None


TABLE = Table(ChatRequest, REFUSED)


def parse(
    body: dict[str, Any], model: ServedModel, limits: Limits, client: str, ignored: Ignored
) -> ParsedRequest:
    """Parse a request. Raises RequestError."""
    given = TABLE.of(body, ignored)
    constraint = parse_constraint(given.response_format, given.structured_outputs, ignored)
    choice = named_tool(given.tool_choice, ignored)
    functions = given_functions(given.tools, ToolDefinition, ignored)
    calls = calling(functions, choice, given.parallel_tool_calls, constraint, model, ignored)
    think, template = _thinking(given, model, ignored)
    with_usage, running = usage_wanted(given, ignored)
    asked = generation(
        given,
        limits,
        client,
        messages=parse_messages(given.messages),
        count=parse_count(given.n, limits),
        sampling=sampling(given, _limit(given), _alternatives(given)),
        think=think,
        template=template,
        **calls,
    )
    renderer = ChatRenderer(
        model=given.model,
        id=new_id("chatcmpl-"),
        logprobs=bool(given.logprobs),
        with_usage=with_usage,
        running_usage=running,
    )
    return ParsedRequest((asked,), given.stream, renderer)


def _thinking(given: ChatRequest, model: ServedModel, ignored: Ignored) -> tuple[Think, dict[str, Any]]:
    """Return whether to think, by whichever of the fields for it was given, and the variables for the template."""
    reasoning = given.reasoning or ReasoningOptions()
    kinds = {"enabled": True, "disabled": False}
    wanted = (
        given.enable_thinking,
        kinds.get(given.thinking.type) if given.thinking else None,
        reasoning.enabled,
    )
    names = dict(given.chat_template_kwargs or {})
    if (enable := next((one for one in wanted if one is not None), None)) is not None:
        names.setdefault("enable_thinking", enable)
    return thinking(given.reasoning_effort or reasoning.effort, names, model, ignored)


def _limit(given: ChatRequest) -> int | None:
    most, older = given.max_completion_tokens, given.max_tokens
    if most is not None and older is not None and most != older:
        raise wrong(
            "max_tokens", "max_tokens and max_completion_tokens mean the same; give only one of them."
        )
    return older if most is None else most


def _alternatives(given: ChatRequest) -> int | None:
    most = given.top_logprobs
    if most and (not given.logprobs or not 0 <= most <= MOST_ALTERNATIVES):
        raise wrong(
            "top_logprobs", f"top_logprobs must be 0 to {MOST_ALTERNATIVES}, and needs logprobs to be true."
        )
    return (most or 0) if given.logprobs else None


@dataclass(slots=True, kw_only=True)
class ChatRenderer(CompletionsRenderer):
    """Renders answers of chats."""

    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    _begun: set[int] = field(default_factory=set)
    _call_ids: dict[tuple[int, int], str] = field(default_factory=dict)

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        chunks: list[bytes] = []
        if state.index not in self._begun:
            self._begun.add(state.index)
            chunks.append(self._event(state, {"role": "assistant", "content": ""}))
        likelihoods = None
        for part in parts:
            match part:
                case Likelihoods(tokens):
                    likelihoods = {"content": [logprob_object(token) for token in tokens], "refusal": None}
                case Thought(text):
                    chunks.append(self._event(state, {"reasoning_content": text}))
                case AnswerText(text):
                    chunks.append(self._event(state, {"content": text}, likelihoods))
                    likelihoods = None
                case CallBegan(number, name):
                    call = {
                        "index": number,
                        "id": self._call_id(state.index, number),
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                    chunks.append(self._event(state, {"tool_calls": [call]}, likelihoods))
                    likelihoods = None
                case CallArguments(number, text):
                    more = {"index": number, "function": {"arguments": text}}
                    chunks.append(self._event(state, {"tool_calls": [more]}, likelihoods))
                    likelihoods = None
                case Finished():
                    chunks.append(self._event(state, {}, likelihoods, openai_finish_reason(state)))
                    likelihoods = None
                case _:
                    pass
        if likelihoods is not None:
            chunks.append(self._event(state, {"content": ""}, likelihoods))
        return chunks

    def _choice(self, state: AnswerState) -> dict[str, Any]:
        return {
            "index": state.index,
            "message": self._message(state),
            "logprobs": self._logprobs(state),
            "finish_reason": openai_finish_reason(state),
        }

    def _message(self, state: AnswerState) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if state.calls and not state.text else state.text,
            "refusal": None,
        }
        if state.reasoning:
            message["reasoning_content"] = state.reasoning
        if state.calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(state.index, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for number, call in enumerate(state.calls)
            ]
        return message

    def _logprobs(self, state: AnswerState) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {"content": [logprob_object(token) for token in state.logprobs], "refusal": None}

    def _call_id(self, index: int, number: int) -> str:
        return self._call_ids.setdefault((index, number), new_id("call_"))

    def _event(
        self,
        state: AnswerState,
        delta: dict[str, Any],
        likelihoods: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": state.index, "delta": delta, "logprobs": likelihoods, "finish_reason": finish}
        return self._chunk(state, choice)


def logprob_object(entry: Logprob) -> dict[str, Any]:
    """Return a token of the answer with the likeliest ones at its position."""
    return {**_token(entry.token), "top_logprobs": [_token(token) for token in entry.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    # JSON has no infinity; vLLM's clients know this number for an impossible token.
    return {"token": token.text, "logprob": max(token.logprob, -9999.0), "bytes": list(token.raw)}
