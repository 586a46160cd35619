"""/v1/chat/completions: parses requests and renders answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chatterm.server.http.answer_state import AnswerState, Finished, Likelihoods, Part, Thought
from chatterm.server.http.fields import Table, TokenCount, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.common import (
    ChatMessagePart,
    ToolDefinition,
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
from chatterm.server.http.renderer import ParsedRequest
from chatterm.server.service import Logprob, ServedModel, TokenLogprob
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan


class ChatRequest(CompletionsRequest, kw_only=True):
    """A request to /v1/chat/completions."""

    messages: list[ChatMessagePart]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: TokenCount | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None


TABLE = Table(
    "/v1/chat/completions",
    ChatRequest,
    harmless={
        "metadata": None,
        "store": (False,),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": None,
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "add_generation_prompt": (True,),
        "stream_obfuscation": (False,),
    },
    refused=(
        *("audio", "functions", "function_call", "prediction", "web_search_options", "best_of", "echo"),
        *("stop_token_ids", "ignore_eos", "min_tokens", "length_penalty", "use_beam_search", "bad_words"),
        *("continue_final_message", "add_special_tokens", "chat_template", "documents", "guided_json"),
        *("guided_regex", "guided_choice", "guided_grammar", "prompt_logprobs", "truncate_prompt_tokens"),
        *("skip_special_tokens", "include_stop_str_in_output", "priority", "return_token_ids", "moderation"),
        *("include_reasoning", "logits_processors", "mm_processor_kwargs", "kv_transfer_params", "thinking"),
    ),
)


def parse(body: dict[str, Any], model: ServedModel, limits: Limits, client: str) -> ParsedRequest:
    """Parse a request. Raises RequestError."""
    given = TABLE.of(body)
    constraint = parse_constraint(given.response_format, given.structured_outputs)
    choice = named_tool(given.tool_choice)
    calls = calling(given.tools or (), choice, given.parallel_tool_calls, constraint, model)
    think, template = thinking(given.reasoning_effort, given.chat_template_kwargs, model)
    with_usage, running = usage_wanted(given)
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


def _limit(given: ChatRequest) -> int | None:
    most, older = given.max_completion_tokens, given.max_tokens
    if most is not None and older is not None and most != older:
        raise wrong(
            "max_tokens", "max_tokens and max_completion_tokens mean the same; give only one of them."
        )
    return older if most is None else most


def _alternatives(given: ChatRequest) -> int | None:
    most = given.top_logprobs
    if most is not None and (not given.logprobs or not 0 <= most <= MOST_ALTERNATIVES):
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
