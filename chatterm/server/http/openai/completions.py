"""/v1/completions: completes texts as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec

from chatterm.server.http.answer_state import AnswerState, Finished, Likelihoods, Part, Thought
from chatterm.server.http.fields import Ignored, Table, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.common import new_id, openai_finish_reason, parse_constraint, parse_count
from chatterm.server.http.openai.completions_base import (
    MOST_ALTERNATIVES,
    CompletionsRenderer,
    CompletionsRequest,
    generation,
    sampling,
    usage_wanted,
)
from chatterm.server.http.openai.refused import REFUSED
from chatterm.server.http.renderer import ParsedRequest
from chatterm.server.service import Logprob, ServedModel
from chatterm.tool_calls.reader import AnswerText

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Prompt = str | list[str] | list[int] | list[list[int]]

_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API."""


class CompletionRequest(CompletionsRequest, kw_only=True):
    """A request to /v1/completions."""

    prompt: Any
    logprobs: int | None = None


TABLE = Table(CompletionRequest, {**REFUSED, "add_special_tokens": (True,), "messages": (), "tools": ([],)})


NAMES = {"messages": "prompt"}
"""What this API calls fields of chats."""


def parse(
    body: dict[str, Any], model: ServedModel, limits: Limits, client: str, ignored: Ignored
) -> ParsedRequest:
    """Parse a request. Raises RequestError."""
    given = TABLE.of(body, ignored)
    prompts = _prompts(given.prompt)
    if given.logprobs is not None and not 0 <= given.logprobs <= MOST_ALTERNATIVES:
        raise wrong("logprobs", f"logprobs must be 0 to {MOST_ALTERNATIVES}.")
    with_usage, running = usage_wanted(given, ignored)
    asked = {
        "count": parse_count(given.n, limits, len(prompts)),
        "sampling": sampling(
            given, _TOKENS if given.max_tokens is None else given.max_tokens, given.logprobs
        ),
        "constraint": parse_constraint(given.response_format, given.structured_outputs, ignored),
    }
    generations = tuple(generation(given, limits, client, prompt=prompt, **asked) for prompt in prompts)
    renderer = CompletionRenderer(
        model=given.model,
        id=new_id("cmpl-"),
        logprobs=given.logprobs is not None,
        with_usage=with_usage,
        running_usage=running,
    )
    return ParsedRequest(generations, given.stream, renderer)


def _prompts(given: object) -> list[str | tuple[int, ...]]:
    """Return one or several prompts, as texts or token ids. Raises RequestError 400."""
    listed: list[Any] = given if isinstance(given, list) else [given]
    if listed and (ids := _ids(listed)) is not None:
        return [ids]
    prompts: list[str | tuple[int, ...]] = []
    for item in listed:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item and (ids := _ids(item)) is not None:
            prompts.append(ids)
        else:
            raise wrong("prompt", "prompt must be a text, a list of token ids, or a list of these.")
    if not prompts:
        raise wrong("prompt", "prompt is empty; write something first.")
    return prompts


def _ids(items: list[Any]) -> tuple[int, ...] | None:
    """Return the items as token ids; None if they are something else."""
    try:
        return msgspec.convert(items, tuple[TokenId, ...])
    except msgspec.ValidationError:
        return None


@dataclass(slots=True, kw_only=True)
class CompletionRenderer(CompletionsRenderer):
    """Renders completions of texts."""

    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    _offsets: dict[int, int] = field(default_factory=dict)

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        text, tokens, finish = "", tuple[Logprob, ...](), None
        for part in parts:
            match part:
                case AnswerText(more) | Thought(more):
                    text += more
                case Likelihoods(found):
                    tokens += found
                case Finished():
                    finish = openai_finish_reason(state)
                case _:
                    pass
        likelihoods = self._logprobs(tokens, self._offsets.get(state.index, 0)) if self.logprobs else None
        self._offsets[state.index] = self._offsets.get(state.index, 0) + sum(
            len(one.token.text) for one in tokens
        )
        return [self._chunk(state, self._said(state.index, text, likelihoods, finish))]

    def _choice(self, state: AnswerState) -> dict[str, Any]:
        likelihoods = self._logprobs(state.logprobs, 0) if self.logprobs else None
        return self._said(state.index, state.reasoning + state.text, likelihoods, openai_finish_reason(state))

    def _said(
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
