"""Converts requests to the engine's prompts and sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from chatterm.backends.backend import EngineError, ModelError
from chatterm.server.process.model_pool import PooledModel
from chatterm.server.service import AnswerConstraint, ChatMessage, Generation, RequestError
from chatterm.tool_calls.format import call_marks, json_value
from chatterm.tool_calls.grammar import explain_refusal, spell_marks
from engine.errors import ContextFullError
from engine.params import SUPPRESSED, SamplingParams
from engine.params import Constraint as EngineConstraint

if TYPE_CHECKING:
    from engine.conversation.requests import PreparedPrompt
    from engine.engine import Engine
    from models.text.tokenizer import Tokenizer

_COMPLETION = 256
"""Default limit of tokens for models without a chat template."""
LONG_PROMPT, _LONG_CONSTRAINT = 50_000, 10_000
"""Characters from which preparing a request takes more than some 20 ms."""


def parse_sampling(engine: "Engine", request: Generation) -> SamplingParams:
    """Return the sampling parameters. Raises RequestError for a value out of range and for an unknown field."""
    given = dict(request.sampling)
    if given.pop("ignore_eos", False):
        given["logit_bias"] = {
            **dict.fromkeys(engine.tokenizer.stop_ids, SUPPRESSED),
            **(given.get("logit_bias") or {}),
        }
    for name in given:
        if name not in _FIELDS:
            raise _wrong(name, f"{name} is not supported here; leave it out.")
    if "stop" in given:
        given["stop"] = tuple(given["stop"] or ())
    unknown = next((id for id in given.get("logit_bias") or () if id >= engine.vocab_size), None)
    if unknown is not None:
        known = f"this model has tokens 0 to {engine.vocab_size - 1}"
        raise _wrong("logit_bias", f"logit_bias names token {unknown}; {known}.")
    if request.constraint is not None:
        given["constraint"] = _constraint(engine.tokenizer, request.constraint)
    limit = {} if engine.tokenizer.has_chat_template or "max_tokens" in given else {"max_tokens": _COMPLETION}
    try:
        return engine.default_params(**{**limit, **given})
    except EngineError as error:
        name = str(error).split(maxsplit=1)[0]
        raise _wrong(name if name in _FIELDS else None, str(error)) from None
    except (TypeError, ValueError):
        wrong = next((name for name in given if not _is_valid(name, given[name])), None)
        raise _wrong(
            wrong, f"{wrong or 'A sampling setting'} has a value of the wrong type; see /docs."
        ) from None


def prepare_prompt(held: PooledModel, request: Generation) -> "PreparedPrompt":
    """Prepare the prompt. Raises RequestError, EngineError and ModelError."""
    engine = held.engine
    check_length(engine, request_texts(request))
    if request.messages is None:
        return held.requests.completes(_checked(held, request.prompt or ""))
    if not engine.tokenizer.has_chat_template:
        raise RequestError(
            400, "invalid_request_error", f"{held.name} completes text and cannot chat; use /v1/completions."
        )
    if request.tools and held.tool_format is None:
        raise _wrong("tools", f"{held.name} cannot call tools; use another model, or leave out tools.")
    if (count := len(request.messages)) > engine.context_length:  # others would wait for their tokenisation
        raise ContextFullError(
            f"The conversation has {count:,} messages, more than the context of {engine.context_length:,} tokens "
            "can hold; leave out earlier ones.",
            needed=count,
            available=engine.context_length,
        )
    return held.requests.asked(
        [template_message(message) for message in request.messages],
        think=held.thinks(request.think),
        tools=request.tools,
        names=request.template,
        shown=call_marks(engine.tokenizer) if request.tools else frozenset(),
    )


def takes_long(held: PooledModel, request: Generation) -> bool:
    """Return whether preparing a request may take so long that others should not wait for it.

    What has too many characters for the context does not: it is refused at once.
    """
    constraint = len(request.constraint.text) if request.constraint is not None else 0
    size = sum(map(len, request_texts(request)))
    return size <= held.most_characters and (size > LONG_PROMPT or constraint > _LONG_CONSTRAINT)


def request_texts(request: Generation) -> list[str]:
    """Return the texts that the prompt of a request is made of."""
    if request.messages is None:
        return [request.prompt] if isinstance(request.prompt, str) else []
    tools = [msgspec.json.encode(request.tools).decode()] if request.tools else []
    return [*message_texts(request.messages), *tools]


def message_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the texts of a conversation."""
    return [
        text
        for message in messages
        for text in (message.content, message.reasoning, *(call.arguments for call in message.tool_calls))
    ]


def check_length(engine: "Engine", texts: Sequence[str]) -> None:
    """Raise ContextFullError for texts that cannot fit the context, without tokenising all of them."""
    room = engine.context_length
    if not engine.tokenizer.may_fit(texts, room):
        size = sum(map(len, texts))
        raise ContextFullError(
            f"The prompt has {size:,} characters, more than the context of {room:,} tokens can hold; shorten it.",
            needed=room + 1,
            available=room,
        )


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message to the form that chat templates expect."""
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json_value(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        made["name"] = message.name
    return made


def about(request: Generation, error: Exception) -> Exception:
    """Return an error in terms of what the client sent, instead of the grammar that was made of it."""
    asked = request.constraint
    if asked is None or asked.kind != "calls" or (said := explain_refusal(str(error), asked.text)) is None:
        return error
    return _wrong("tools", said)


def _constraint(tokenizer: "Tokenizer", asked: AnswerConstraint) -> EngineConstraint:
    """Convert a constraint to the engine's type. Raises RequestError."""
    try:
        if asked.kind == "calls":
            return EngineConstraint("lark", spell_marks(asked.text, tokenizer.token_id))
        return EngineConstraint(asked.kind, asked.text)
    except EngineError as error:
        raise _wrong("response_format", str(error)) from None


def _checked(held: PooledModel, prompt: str | tuple[int, ...]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    size = held.engine.vocab_size
    if prompt and not 0 <= min(prompt) <= max(prompt) < size:
        unknown = [id for id in prompt if not 0 <= id < size]
        raise _wrong("prompt", f"There is no token {unknown[0]}; {held.name} has {held.engine.vocab_size:,}.")
    return list(prompt)


_FIELDS: Mapping[str, Any] = {
    field.name: field for field in fields(SamplingParams) if field.name != "constraint"
}


def _is_valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except (EngineError, ModelError, TypeError, ValueError):
        return False
    return True


def _wrong(name: str | None, message: str) -> RequestError:
    return RequestError(400, "invalid_request_error", message, param=name)


def bounded(request: Generation, prompt_tokens: int, params: SamplingParams, context: int) -> SamplingParams:
    """Return `params` with the answer limited to `most_tokens`. Raises RequestError if there is no room for one."""
    most = request.most_tokens
    room = context if most is None else min(most, context)
    if prompt_tokens >= room:
        message = (
            f"The prompt has {prompt_tokens:,} tokens; with its answer it may have {room:,} here. Shorten it."
        )
        raise RequestError(
            400, "invalid_request_error", message, param="messages", code="context_length_exceeded"
        )
    if most is None:
        return params
    left = most - prompt_tokens
    return replace(params, max_tokens=min(left, params.max_tokens or left))
