"""/v1/chat/completions: what clients send, and what they read."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from chatterm.server.http.answers import (
    AnswerState,
    Finished,
    Likelihoods,
    Part,
    Thought,
    Totals,
)
from chatterm.server.http.asked import Asked
from chatterm.server.http.errors import error_object
from chatterm.server.http.fields import Table, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.common import (
    Message,
    ResponseFormat,
    Strings,
    StructuredOutputs,
    Tool,
    bias_of,
    choice_of,
    constraint_of,
    count_of,
    finish_of,
    messages_of,
    named_tool,
    new_id,
    sampling_of,
    stops_of,
    strict_of,
    thinking,
    tools_of,
    usage_of,
    with_tools,
)
from chatterm.server.http.sse import DONE, event
from chatterm.server.service import Generation, Logprob, RequestError, ServedModel, TokenLogprob
from chatterm.server.tool_calls import CallArguments, CallBegan, Text

encode = msgspec.json.encode


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(Struct):
    """The fields that have an effect."""

    model: str
    messages: list[Message]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    safety_identifier: str | None = None


SAMPLING = (
    *("seed", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

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


def parse(body: dict[str, Any], model: ServedModel, limits: Limits, client: str) -> Asked:
    """What the client wants. Raises RequestError."""
    given = TABLE.of(body)
    tools = tools_of(given.tools)
    choice = choice_of(named_tool(given.tool_choice), tools)
    tools = () if choice == "none" else tools
    constraint = constraint_of(given.response_format, given.structured_outputs)
    parallel = given.parallel_tool_calls is not False
    constraint = with_tools(constraint, model, tools, choice, parallel, strict_of(given.tools))
    think, template = thinking(given.reasoning_effort, given.chat_template_kwargs, model)
    count = count_of(given.n, limits)
    sampling = sampling_of(given, SAMPLING)
    if (stops := stops_of(given.stop)) is not None:
        sampling["stop"] = stops
    if (bias := bias_of(given.logit_bias)) is not None:
        sampling["logit_bias"] = bias
    if (most := _limit(given)) is not None:
        sampling["max_tokens"] = most
    if given.top_logprobs is not None and (not given.logprobs or not 0 <= given.top_logprobs <= 20):
        raise wrong("top_logprobs", "top_logprobs must be 0 to 20, and needs logprobs to be true.")
    if given.logprobs:
        sampling["logprobs"] = given.top_logprobs or 0
    options = given.stream_options
    if options is not None and not given.stream:
        raise wrong("stream_options", "stream_options needs stream to be true.")
    generation = Generation(
        model=given.model,
        messages=messages_of(given.messages),
        count=count,
        sampling=sampling,
        think=think,
        template=template,
        tools=tools,
        tool_choice=choice,
        constraint=constraint,
        most_tokens=limits.context,
        deadline_s=limits.request_s,
        client=f"{client} {given.safety_identifier or given.user or ''}".rstrip(),
        cache_key=given.prompt_cache_key,
    )
    with_usage = options is not None and bool(options.include_usage)
    running = options is not None and bool(options.continuous_usage_stats)
    renderer = ChatRenderer(given.model, bool(given.logprobs), with_usage, running, bool(tools))
    return Asked((generation,), given.stream, renderer)


def _limit(given: ChatRequest) -> int | None:
    most, older = given.max_completion_tokens, given.max_tokens
    if most is not None and older is not None and most != older:
        raise wrong("max_tokens", "max_tokens and max_completion_tokens mean the same; give one of them.")
    return older if most is None else most


@dataclass(slots=True)
class ChatRenderer:
    """Chunks, or one completion."""

    model: str
    logprobs: bool
    with_usage: bool
    running_usage: bool
    tools: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _totals: Totals = field(default_factory=Totals)
    _call_ids: dict[tuple[int, int], str] = field(default_factory=dict)

    def begin(self, totals: Totals) -> list[bytes]:
        self._totals = totals
        return []

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        chunks: list[bytes] = []
        if state.index not in self._begun:
            self._begun.add(state.index)
            chunks.append(self._chunk(state, {"role": "assistant", "content": ""}))
        likelihoods = None
        for part in parts:
            match part:
                case Likelihoods(tokens):
                    likelihoods = {"content": [logprob_object(token) for token in tokens], "refusal": None}
                case Thought(text):
                    chunks.append(self._chunk(state, {"reasoning_content": text}))
                case Text(text):
                    chunks.append(self._chunk(state, {"content": text}, likelihoods))
                    likelihoods = None
                case CallBegan(number, name):
                    call = {
                        "index": number,
                        "id": self._call_id(state.index, number),
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                    chunks.append(self._chunk(state, {"tool_calls": [call]}, likelihoods))
                    likelihoods = None
                case CallArguments(number, text):
                    more = {"index": number, "function": {"arguments": text}}
                    chunks.append(self._chunk(state, {"tool_calls": [more]}, likelihoods))
                    likelihoods = None
                case Finished():
                    chunks.append(self._chunk(state, {}, likelihoods, finish_of(state)))
                    likelihoods = None
                case _:
                    pass
        if likelihoods is not None:
            chunks.append(self._chunk(state, {"content": ""}, likelihoods))
        return chunks

    def end(self, states: Sequence[AnswerState], totals: Totals) -> list[bytes]:
        if not self.with_usage:
            return [DONE]
        return [event({**self._head(), "choices": [], "usage": usage_of(states, totals)}), DONE]

    def failed(self, error: RequestError) -> list[bytes]:
        return [event(error_object(error)), DONE]

    def whole(self, states: Sequence[AnswerState], totals: Totals) -> bytes:
        choices = [
            {
                "index": state.index,
                "message": self._message(state),
                "logprobs": self._logprobs(state),
                "finish_reason": finish_of(state),
            }
            for state in states
        ]
        return encode(
            {
                "id": self.id,
                "object": "chat.completion",
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "usage": usage_of(states, totals),
                "system_fingerprint": None,
            }
        )

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
                    "function": {"name": call.name, "arguments": call.arguments},
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

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def _chunk(
        self,
        state: AnswerState,
        delta: dict[str, Any],
        likelihoods: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": state.index, "delta": delta, "logprobs": likelihoods, "finish_reason": finish}
        chunk = {**self._head(), "choices": [choice]}
        if self.running_usage:
            prompt = self._totals.prompt_tokens
            chunk["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": state.tokens,
                "total_tokens": prompt + state.tokens,
            }
        elif self.with_usage:
            chunk["usage"] = None
        return event(chunk)


def logprob_object(entry: Logprob) -> dict[str, Any]:
    """A token of the answer with the likeliest ones at its place."""
    return {**_token(entry.token), "top_logprobs": [_token(token) for token in entry.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    # JSON knows no infinity; vLLM's clients know this number for a token that could not come.
    return {"token": token.text, "logprob": max(token.logprob, -9999.0), "bytes": list(token.raw)}
