"""/v1/responses: parses requests. `responses_render` renders the answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from chatterm.server.http.fields import Ignored, Table, TokenCount, convert, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.common import (
    Function,
    NamedFunction,
    NamedTool,
    ToolDefinition,
    given_functions,
    given_sampling,
    parse_text,
    schema_constraint,
    thinking,
)
from chatterm.server.http.openai.completions_base import (
    MOST_ALTERNATIVES,
    CompletionRequest,
    calling,
    generation,
)
from chatterm.server.http.openai.refused import REFUSED
from chatterm.server.http.openai.responses_render import ResponseRenderer
from chatterm.server.http.renderer import ParsedRequest
from chatterm.server.service import AnswerConstraint, ChatMessage, HistoryToolCall, Role, ServedModel


class Reasoning(Struct, forbid_unknown_fields=True):
    effort: str | None = None


class TextFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None


class FunctionTool(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    type: Literal["function"] = "function"


class ResponsesRequest(CompletionRequest, kw_only=True):
    """A request to /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    max_output_tokens: TokenCount | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None


TABLE = Table(
    ResponsesRequest,
    {
        **REFUSED,
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "context_management"), ()),
        "background": (False,),
    },
)

NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What this API calls fields of chats."""
_LOGPROBS = "message.output_text.logprobs"


def parse(
    body: dict[str, Any], model: ServedModel, limits: Limits, client: str, ignored: Ignored
) -> ParsedRequest:
    """Parse a request. Raises RequestError."""
    given = TABLE.of(body, ignored)
    tools = given_functions(given.tools, FunctionTool, ignored)
    functions = [ToolDefinition(_function(tool)) for tool in tools]
    choice, parallel = _choice(given.tool_choice, ignored), given.parallel_tool_calls
    calls = calling(functions, choice, parallel, _constraint(given.text, ignored), model, ignored)
    effort = given.reasoning.effort if given.reasoning is not None else None
    think, template = thinking(effort, None, model, ignored, "reasoning.effort")
    for name in given.include or ():
        if name != _LOGPROBS:
            ignored.add(f"include[{name}]")
    logprobs = given.top_logprobs is not None or _LOGPROBS in (given.include or ())
    sampling = given_sampling(given, ("temperature", "top_p"))
    if given.max_output_tokens is not None:
        sampling["max_tokens"] = given.max_output_tokens
    if logprobs:
        sampling["logprobs"] = given.top_logprobs or 0
        if not 0 <= sampling["logprobs"] <= MOST_ALTERNATIVES:
            raise wrong("top_logprobs", f"top_logprobs must be 0 to {MOST_ALTERNATIVES}.")
    asked = generation(
        given,
        limits,
        client,
        messages=_messages(given.instructions, given.input, ignored),
        sampling=sampling,
        think=think,
        template=template,
        **calls,
    )
    return ParsedRequest((asked,), given.stream, ResponseRenderer(given.model, _echo(given, tools), logprobs))


def _echo(given: ResponsesRequest, tools: Sequence[FunctionTool]) -> dict[str, Any]:
    """Return the fields of the request that a response repeats."""
    text = (
        given.text.format if given.text is not None and given.text.format is not None else TextFormat("text")
    )
    format = {name: value for name, value in msgspec.to_builtins(text).items() if value is not None}
    return {
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": given.reasoning.effort if given.reasoning else None, "summary": None},
        "store": False,
        "temperature": given.temperature,
        "text": {"format": format},
        "tool_choice": given.tool_choice if given.tool_choice is not None else "auto",
        "tools": [msgspec.to_builtins(tool) for tool in tools],
        "top_p": given.top_p,
        "truncation": "disabled",
        "user": given.user,
    }


def _function(tool: FunctionTool) -> Function:
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def _choice(given: Any, ignored: Ignored) -> str | NamedTool | None:
    if given is None or isinstance(given, str):
        return given
    found = convert(given, FunctionTool, "tool_choice", ignored)
    return NamedTool("function", NamedFunction(found.name))


def _constraint(text: TextOptions | None, ignored: Ignored) -> AnswerConstraint | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return AnswerConstraint("json_object")
    if text.format.schema is None:
        raise wrong("text.format.schema", "text.format.schema is missing.")
    return schema_constraint(text.format.schema, ignored, bool(text.format.strict))


class _InputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str | None = None
    status: str | None = None


class _MessageItem(_InputItem):
    role: Role
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    phase: str | None = None


class _CallItem(_InputItem):
    call_id: str
    name: str
    arguments: str
    type: Literal["function_call"]
    namespace: str | None = None


class _ResultItem(_InputItem):
    call_id: str
    output: str | list[dict[str, Any]]
    type: Literal["function_call_output"]


class _ReasoningItem(_InputItem):
    type: Literal["reasoning"]
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


def _messages(
    instructions: str | None, given: str | Sequence[Mapping[str, Any]], ignored: Ignored
) -> tuple[ChatMessage, ...]:
    """Convert the conversation, items of one answer (thinking, text, calls) to one message. Raises RequestError 400."""
    found = [ChatMessage("system", instructions)] if instructions else []
    if isinstance(given, str):
        return (*found, ChatMessage("user", given))
    if not given:
        raise wrong("input", "input is empty; write something first.")
    for number, item in enumerate(given):
        message = _message(item, f"input[{number}]", ignored)
        if message.role == "assistant" and found and found[-1].role == "assistant":
            before = found.pop()
            message = ChatMessage(
                "assistant",
                before.content + message.content,
                before.reasoning + message.reasoning,
                before.tool_calls + message.tool_calls,
            )
        found.append(message)
    return tuple(found)


def _message(item: Mapping[str, Any], place: str, ignored: Ignored) -> ChatMessage:
    """Convert an item to a message, or to a part of an assistant's. Raises RequestError 400."""
    match item.get("type", "message"):
        case "message":
            message = convert(item, _MessageItem, place, ignored)
            if message.role == "tool":
                raise wrong(
                    f"{place}.role", f"{place}: results of tools are items of type function_call_output."
                )
            return ChatMessage(message.role, parse_text(message.content, f"{place}.content"))
        case "function_call_output":
            result = convert(item, _ResultItem, place, ignored)
            return ChatMessage(
                "tool", parse_text(result.output, f"{place}.output"), tool_call_id=result.call_id
            )
        case "function_call":
            call = convert(item, _CallItem, place, ignored)
            calls = (HistoryToolCall(call.call_id, call.name, call.arguments),)
            return ChatMessage("assistant", "", tool_calls=calls)
        case "reasoning":
            parts = convert(item, _ReasoningItem, place, ignored).content or []
            texts = (part["text"] for part in parts if isinstance(part.get("text"), str))
            return ChatMessage("assistant", "", "".join(texts))
        case kind:
            shown = kind if isinstance(kind, str) else "of unknown type"
            raise wrong(place, f"{place}: items {shown[:40]!r} are not supported.")
