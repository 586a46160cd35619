"""/v1/completions: texts that are completed as they are."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from chatterm.server.http.answers import AnswerState, Finished, Likelihoods, Part, Thought, Totals
from chatterm.server.http.asked import Asked
from chatterm.server.http.errors import error_object
from chatterm.server.http.fields import Table, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.chat import SAMPLING, StreamOptions
from chatterm.server.http.openai.common import (
    ResponseFormat,
    Strings,
    StructuredOutputs,
    bias_of,
    constraint_of,
    count_of,
    finish_of,
    new_id,
    sampling_of,
    stops_of,
    usage_of,
)
from chatterm.server.http.sse import DONE, event
from chatterm.server.service import Generation, Logprob, RequestError, ServedModel
from chatterm.server.tool_calls import Text

Prompt = str | list[str] | list[int] | list[list[int]]

_TOKENS = 16
"""What a completion may take where nobody says; OpenAI's number."""


class CompletionRequest(Struct):
    """The fields that have an effect."""

    model: str
    prompt: Any
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
    logprobs: int | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


TABLE = Table(
    "/v1/completions",
    CompletionRequest,
    harmless={"echo": (False,), "best_of": (1,), "suffix": ("",), "add_special_tokens": (True,)},
    refused=(
        *("stop_token_ids", "ignore_eos", "min_tokens", "length_penalty", "use_beam_search", "bad_words"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_logprobs"),
        *("truncate_prompt_tokens", "skip_special_tokens", "include_stop_str_in_output", "priority"),
        *("return_token_ids", "logits_processors", "prompt_embeds", "messages", "tools"),
    ),
)


def parse(body: dict[str, Any], model: ServedModel, limits: Limits, client: str) -> Asked:
    """What the client wants. Raises RequestError."""
    given = TABLE.of(body)
    prompts = _prompts(given.prompt)
    count = count_of(given.n, limits, len(prompts))
    sampling: dict[str, Any] = {"max_tokens": _TOKENS, **sampling_of(given, (*SAMPLING, "max_tokens"))}
    if (stops := stops_of(given.stop)) is not None:
        sampling["stop"] = stops
    if (bias := bias_of(given.logit_bias)) is not None:
        sampling["logit_bias"] = bias
    if given.logprobs is not None:
        if not 0 <= given.logprobs <= 20:
            raise wrong("logprobs", "logprobs must be 0 to 20.")
        sampling["logprobs"] = given.logprobs
    options = given.stream_options
    if options is not None and not given.stream:
        raise wrong("stream_options", "stream_options needs stream to be true.")
    constraint = constraint_of(given.response_format, given.structured_outputs)
    generations = tuple(
        Generation(
            model=given.model,
            prompt=prompt,
            count=count,
            sampling=sampling,
            constraint=constraint,
            most_tokens=limits.context,
            deadline_s=limits.request_s,
            client=f"{client} {given.user or ''}".rstrip(),
            cache_key=given.prompt_cache_key,
        )
        for prompt in prompts
    )
    with_usage = options is not None and bool(options.include_usage)
    return Asked(
        generations, given.stream, CompletionRenderer(given.model, given.logprobs is not None, with_usage)
    )


def _prompts(given: object) -> list[str | tuple[int, ...]]:
    """One or several, as texts or token ids. Raises RequestError 400."""
    listed: list[Any] = given if isinstance(given, list) else [given]
    if listed and all(_is_id(item) for item in listed):
        return [tuple(listed)]
    prompts: list[str | tuple[int, ...]] = []
    for item in listed:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item and all(_is_id(id) for id in item):
            prompts.append(tuple(item))
        else:
            raise wrong("prompt", "prompt must be a text, a list of token ids, or a list of these.")
    if not prompts:
        raise wrong("prompt", "prompt is empty; write something first.")
    return prompts


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31


@dataclass(slots=True)
class CompletionRenderer:
    """Chunks, or one completion."""

    model: str
    logprobs: bool
    with_usage: bool
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)

    def begin(self, totals: Totals) -> list[bytes]:
        return []

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        text, tokens, finish = "", tuple[Logprob, ...](), None
        for part in parts:
            match part:
                case Text(more) | Thought(more):
                    text += more
                case Likelihoods(found):
                    tokens += found
                case Finished():
                    finish = finish_of(state)
                case _:
                    pass
        likelihoods = self._logprobs(tokens, self._offsets.get(state.index, 0)) if self.logprobs else None
        self._offsets[state.index] = self._offsets.get(state.index, 0) + sum(
            len(one.token.text) for one in tokens
        )
        chunk = {**self._head(), "choices": [self._choice(state.index, text, likelihoods, finish)]}
        if self.with_usage:
            chunk["usage"] = None
        return [event(chunk)]

    def end(self, states: Sequence[AnswerState], totals: Totals) -> list[bytes]:
        if not self.with_usage:
            return [DONE]
        return [event({**self._head(), "choices": [], "usage": usage_of(states, totals)}), DONE]

    def failed(self, error: RequestError) -> list[bytes]:
        return [event(error_object(error)), DONE]

    def whole(self, states: Sequence[AnswerState], totals: Totals) -> bytes:
        choices = [
            self._choice(
                state.index,
                state.reasoning + state.text,
                self._logprobs(state.logprobs, 0) if self.logprobs else None,
                finish_of(state),
            )
            for state in states
        ]
        return msgspec.json.encode({**self._head(), "choices": choices, "usage": usage_of(states, totals)})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def _choice(
        self, index: int, text: str, likelihoods: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": likelihoods, "finish_reason": finish}

    def _logprobs(self, entries: Sequence[Logprob], offset: int) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry.token.text)
        return {
            "tokens": [entry.token.text for entry in entries],
            "token_logprobs": [max(entry.token.logprob, -9999.0) for entry in entries],
            "top_logprobs": [
                {token.text: max(token.logprob, -9999.0) for token in (*entry.top, entry.token)}
                for entry in entries
            ],
            "text_offset": offsets,
        }
