"""/api/chat and /api/generate: parses requests."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from chatterm.server.http.fields import Ignored, Table, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.ollama.render import GenerateRenderer, OllamaChatRenderer, stamp
from chatterm.server.http.openai.common import (
    Strings,
    ToolDefinition,
    given_functions,
    given_sampling,
    parse_stops,
    parse_tools,
    schema_constraint,
    thinking,
    with_tools,
)
from chatterm.server.http.openai.completions_base import MOST_ALTERNATIVES
from chatterm.server.http.renderer import ParsedRequest
from chatterm.server.service import (
    AnswerConstraint,
    ChatMessage,
    Generation,
    HistoryToolCall,
    Role,
    ServedModel,
    Service,
    Think,
)

KeepAlive = str | float
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class OllamaOptions(Struct):
    """Options of an answer."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: Annotated[int, Meta(lt=2**31)] | None = None
    stop: Strings | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


OPTIONS = Table(OllamaOptions, place="options.")
"""Others are ignored, as Ollama does with many: they are about the machine, or about samplers that it no longer has."""


class OllamaFunctionCall(Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class OllamaCall(Struct, forbid_unknown_fields=True):
    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True):
    role: Role
    content: str | None = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    images: list[Any] | None = None


class _Request(Struct, kw_only=True):
    """The fields of both that have an effect."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: int = 0


class OllamaChatRequest(_Request, kw_only=True):
    """A request to /api/chat."""

    messages: list[OllamaMessage] = []
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(_Request, kw_only=True):
    """A request to /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False


NAMES = {
    "response_format": "format",
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "reasoning_effort": "think",
}
"""What this API calls fields of OpenAI's."""
CHAT = Table(OllamaChatRequest)
GENERATE = Table(
    GenerateRequest,
    {
        **dict.fromkeys(("width", "height", "steps"), ()),
        **dict.fromkeys(("suffix", "template"), ("",)),
        **dict.fromkeys(("context", "images"), ([],)),
    },
)


def parse_chat(
    body: dict[str, Any], model: ServedModel, limits: Limits, client: str, ignored: Ignored
) -> ParsedRequest:
    """Parse a request to /api/chat. Raises RequestError."""
    given = CHAT.of(body, ignored)
    tools = parse_tools(given_functions(given.tools, ToolDefinition, ignored))
    constraint = with_tools(_constraint(given.format, ignored), model, tools, "auto", True, ignored)
    think, template = _think(given.think, model, ignored)
    generation = Generation(
        model=given.model,
        messages=_messages(given.messages),
        sampling=_sampling(given.options, ignored) | _logprobs(given),
        think=think,
        template=template,
        tools=tools,
        constraint=constraint,
        most_tokens=limits.context,
        deadline_s=limits.request_s,
        client=client,
        keep_alive_s=parse_keep_alive(given.keep_alive),
    )
    return ParsedRequest((generation,), given.stream, OllamaChatRenderer(given.model))


def parse_generate(
    body: dict[str, Any], model: ServedModel, limits: Limits, client: str, ignored: Ignored
) -> ParsedRequest:
    """Parse a request to /api/generate. Raises RequestError."""
    given = GENERATE.of(body, ignored)
    think, template = _think(given.think, model, ignored)
    system = (ChatMessage("system", given.system),) if given.system else ()
    is_raw = given.raw or not model.chats
    if is_raw and given.system:
        raise wrong("system", "A raw prompt has no system prompt; put it into the prompt.")
    generation = Generation(
        model=given.model,
        messages=None if is_raw else (*system, ChatMessage("user", given.prompt)),
        prompt=given.prompt if is_raw else None,
        sampling=_sampling(given.options, ignored) | _logprobs(given),
        think=think,
        template=template,
        constraint=_constraint(given.format, ignored),
        most_tokens=limits.context,
        deadline_s=limits.request_s,
        client=client,
        keep_alive_s=parse_keep_alive(given.keep_alive),
    )
    return ParsedRequest((generation,), given.stream, GenerateRenderer(given.model))


async def load_chat(
    body: dict[str, Any], model: ServedModel, service: Service, ignored: Ignored
) -> bytes | None:
    """Load the model for a chat without messages, or unload it (`keep_alive` 0); return None for other chats."""
    if body.get("messages"):
        return None
    given = CHAT.of(body, ignored)
    message = {"message": {"role": "assistant", "content": ""}}
    return await _loaded(given.keep_alive, model, service, message)


async def load_generate(
    body: dict[str, Any], model: ServedModel, service: Service, ignored: Ignored
) -> bytes | None:
    """Load or unload the model for a request without a prompt; return None for other requests."""
    if body.get("prompt"):
        return None
    given = GENERATE.of(body, ignored)
    return await _loaded(given.keep_alive, model, service, {"response": ""})


async def _loaded(
    keep_alive: KeepAlive | None, model: ServedModel, service: Service, said: dict[str, Any]
) -> bytes:
    seconds = parse_keep_alive(keep_alive)
    await service.hold(model.name, seconds)
    reason = "unload" if seconds == 0 else "load"
    head = {"model": model.name, "created_at": stamp()}
    return msgspec.json.encode({**head, **said, "done": True, "done_reason": reason})


def parse_keep_alive(given: KeepAlive | None) -> float | None:
    """Parse a duration of Ollama's clients: seconds, or "5m"; below 0 means forever. Raises RequestError 400."""
    if given is None:
        return None
    if isinstance(given, str):
        parts = _DURATION.findall(given)
        try:
            if parts and "".join(map("".join, parts)) == given:
                seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
            else:
                seconds = float(given)
        except ValueError:
            raise wrong("keep_alive", 'keep_alive must be seconds or a duration such as "5m".') from None
    else:
        seconds = given
    if not seconds < 1e9:
        raise wrong("keep_alive", "keep_alive is too long; -1 keeps the model loaded.")
    return -1.0 if seconds < 0 else seconds


def _messages(given: Sequence[OllamaMessage]) -> tuple[ChatMessage, ...]:
    """Convert the conversation. Tool results without ids are matched to calls by name, otherwise in order."""
    found: list[ChatMessage] = []
    waiting: list[HistoryToolCall] = []
    for number, message in enumerate(given):
        if message.images:
            raise wrong(f"messages[{number}].images", "Images are not supported; send text.")
        calls = [
            HistoryToolCall(
                call.id or f"call_{number}_{at}",
                call.function.name,
                msgspec.json.encode(call.function.arguments).decode(),
            )
            for at, call in enumerate(message.tool_calls or ())
        ]
        name = message.tool_name or message.name
        id = message.tool_call_id
        if message.role == "tool" and id is None:
            call = next((call for call in waiting if call.name == name), next(iter(waiting), None))
            if call is not None:
                waiting.remove(call)
            id = call.id if call is not None else f"call_{number}"
        if calls:
            waiting = list(calls)
        found.append(
            ChatMessage(message.role, message.content or "", message.thinking or "", tuple(calls), id, name)
        )
    return tuple(found)


def _constraint(format: str | dict[str, Any] | None, ignored: Ignored) -> AnswerConstraint | None:
    if format is None or format == "":
        return None
    if isinstance(format, dict):
        return schema_constraint(format, ignored)
    if format != "json":
        raise wrong("format", 'format must be "json" or a JSON schema.')
    return AnswerConstraint("json_object")


def _think(given: bool | str | None, model: ServedModel, ignored: Ignored) -> tuple[Think, dict[str, Any]]:
    if isinstance(given, str):
        return thinking(given, None, model, ignored, "think")
    if given is not None and model.thinks is False:
        ignored.add("think")
    return ("auto" if given is None else "on" if given else "off"), {}


def _logprobs(given: _Request) -> dict[str, Any]:
    if not 0 <= given.top_logprobs <= MOST_ALTERNATIVES:
        raise wrong("top_logprobs", f"top_logprobs must be between 0 and {MOST_ALTERNATIVES}")
    if given.top_logprobs and not given.logprobs:
        raise wrong("top_logprobs", "top_logprobs needs logprobs to be true.")
    return {"logprobs": given.top_logprobs} if given.logprobs else {}


def _sampling(given: Mapping[str, Any] | None, ignored: Ignored) -> dict[str, Any]:
    if given is None:
        return {}
    options = OPTIONS.of(given, ignored)
    same = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
    found = given_sampling(options, same)
    if options.seed == -1:
        del found["seed"]  # -1 means any
    if options.repeat_penalty is not None:
        found["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:  # otherwise, until the model ends
        found["max_tokens"] = options.num_predict
    if (stops := parse_stops(options.stop)) is not None:
        found["stop"] = stops
    return found
