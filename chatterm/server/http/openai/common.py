"""Shared by OpenAI's endpoints: messages, tools, sampling, formats of answers, ids, usage."""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from chatterm.server.http.answer_state import AnswerState, Totals
from chatterm.server.http.fields import Ignored, convert, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.service import AnswerConstraint, ChatMessage, HistoryToolCall, Role, ServedModel, Think
from chatterm.tool_calls.grammar import NO_PARAMETERS, calls_or, forced_calls, free_calls
from engine.errors import EngineError
from models.units import counted

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_TOOLS = 128
_MOST_STOPS = 16
_LIKELIEST = 1e-9
"""A top_p so small that only the likeliest token is left."""
_LONGEST_STOP = 1000
_EFFORTS: Mapping[str, Think] = {
    "none": "off",
    "minimal": "off",
    "low": "on",
    "medium": "on",
    "high": "on",
    "xhigh": "on",
}
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")

Strings = str | list[str]
S = TypeVar("S", bound=Struct)


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class FunctionCallPart(Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessagePart(Struct, forbid_unknown_fields=True):
    """A message of a conversation. An answer may be sent back as it was received."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[FunctionCallPart] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    prefix: bool | None = None
    """Whether this answer is to be continued; `partial` means the same."""
    partial: bool | None = None


class Function(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class Schema(Struct, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None
    schema: dict[str, Any] | None = None
    """That of a json_object, as llama-server's clients write it."""


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """As vLLM's clients ask for it; exactly one is given."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def parse_messages(given: Sequence[ChatMessagePart], place: str = "messages") -> tuple[ChatMessage, ...]:
    """Convert the conversation. Raises RequestError 400 that names the message."""
    if not given:
        raise wrong(place, f"{place} is empty; write something first.")
    found = []
    for number, message in enumerate(given):
        where = f"{place}[{number}]"
        text = parse_text(message.content, f"{where}.content") or message.refusal or ""
        calls = tuple(
            HistoryToolCall(call.id, call.function.name, _json_text(call.function.arguments))
            for call in message.tool_calls or ()
        )
        if message.prefix or message.partial:
            name = "prefix" if message.prefix else "partial"
            raise wrong(
                f"{where}.{name}", f"{where}.{name}: an answer cannot be continued here; leave it out."
            )
        if message.role != "assistant" and (calls or message.reasoning_content or message.reasoning):
            raise wrong(where, f"{where}: only an assistant's message can have tool_calls or reasoning.")
        if message.content is None and message.role != "assistant":
            raise wrong(f"{where}.content", f"{where}.content is missing.")
        if message.role == "tool" and message.tool_call_id is None:
            raise wrong(
                f"{where}.tool_call_id", f"{where}.tool_call_id is missing: it says which call this answers."
            )
        found.append(
            ChatMessage(
                message.role,
                text,
                message.reasoning_content or message.reasoning or "",
                calls,
                message.tool_call_id,
                message.name,
            )
        )
    return tuple(found)


def _json_text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def parse_text(content: str | Sequence[Mapping[str, Any]] | None, place: str) -> str:
    """Join the text of a message that may come in parts. Raises RequestError 400 for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            shown = kind if isinstance(kind, str) else "of unknown type"
            raise wrong(
                f"{place}[{number}]", f"{place}[{number}]: parts {shown[:40]!r} are not supported; send text."
            )
        if not isinstance(text, str):
            raise wrong(f"{place}[{number}].text", f"{place}[{number}].text must be a string.")
        texts.append(text)
    return "".join(texts)


def given_functions(given: Sequence[Mapping[str, Any]] | None, kind: type[S], ignored: Ignored) -> list[S]:
    """Convert the tools that are functions. Others, which a client brings or its own server has, are left out."""
    found = []
    for number, tool in enumerate(given or ()):
        if tool.get("type", "function") == "function":
            found.append(convert(tool, kind, f"tools[{number}]", ignored))
        else:
            ignored.add(f"tools[{tool['type']}]")
    return found


def parse_tools(given: Sequence[ToolDefinition] | None) -> tuple[Mapping[str, Any], ...]:
    """Return the functions that a model may call, in OpenAI's format. Raises RequestError 400."""
    tools = given or ()
    if len(tools) > _MOST_TOOLS:
        raise wrong("tools", f"tools has {len(tools)} functions; at most {_MOST_TOOLS} are allowed.")
    names = set()
    for number, tool in enumerate(tools):
        name = tool.function.name
        if not _TOOL_NAME.fullmatch(name) or name in names:
            reason = "occurs twice" if name in names else "must be 1 to 64 letters, digits, _, . or -"
            raise wrong(f"tools[{number}].function.name", f"tools[{number}].function.name {reason}.")
        names.add(name)
    return tuple(
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                **(
                    {"description": tool.function.description}
                    if tool.function.description is not None
                    else {}
                ),
                "parameters": tool.function.parameters or NO_PARAMETERS,
            },
        }
        for tool in tools
    )


def parse_tool_choice(given: str | NamedTool | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return "auto", "none", "required" or the name of a function. Raises RequestError 400."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(given, NamedTool):
        if given.function.name not in names:
            raise wrong("tool_choice", "tool_choice names a function that is not among the tools.")
        return given.function.name
    choice = "required" if given == "any" else given or "auto"  # Mistral's clients write "any"
    if choice not in ("auto", "none", "required"):
        raise wrong("tool_choice", 'tool_choice must be "auto", "none", "required" or a function.')
    if choice == "required" and not tools:
        raise wrong("tool_choice", "tool_choice is required but there are no tools.")
    return choice


def parse_constraint(
    format: ResponseFormat | None, structured: StructuredOutputs | None, ignored: Ignored
) -> AnswerConstraint | None:
    """Return the constraint of the answer, if any. Raises RequestError 400."""
    if structured is not None:
        return _structured(structured, format, ignored)
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        if format.schema is not None:
            return schema_constraint(format.schema, ignored)
        return AnswerConstraint("json_object")
    if format.json_schema is None or format.json_schema.schema is None:
        raise wrong("response_format.json_schema", "response_format.json_schema.schema is missing.")
    return schema_constraint(format.json_schema.schema, ignored, bool(format.json_schema.strict))


def schema_constraint(
    schema: Mapping[str, Any], ignored: Ignored, is_strict: bool = False
) -> AnswerConstraint:
    """Return the constraint to JSON of this schema; unless it `is_strict`, as far as a grammar can express it."""
    ignored.schema = schema
    found = schema if is_strict else ignored.express(schema)
    return AnswerConstraint("json_schema", msgspec.json.encode(found).decode())


def _structured(
    given: StructuredOutputs, format: ResponseFormat | None, ignored: Ignored
) -> AnswerConstraint | None:
    place = "structured_outputs"
    kinds = [name for name in given.__struct_fields__ if getattr(given, name) not in (None, False)]
    if len(kinds) != 1 or (format is not None and format.type != "text"):
        raise wrong(place, f"{place} must have exactly one field, and response_format must then be left out.")
    if given.json is not None:
        return schema_constraint(given.json, ignored)
    if given.regex is not None:
        return AnswerConstraint("regex", given.regex)
    if given.choice is not None:
        if not given.choice:
            raise wrong(f"{place}.choice", f"{place}.choice is empty.")
        choices = " | ".join(
            map(json.dumps, given.choice)
        )  # one terminal may have any number of alternatives
        return AnswerConstraint("lark", f"start: CHOICE\nCHOICE: {choices}")
    if given.grammar is not None:
        return AnswerConstraint("lark", given.grammar)
    return AnswerConstraint("json_object")


def with_tools(
    constraint: AnswerConstraint | None,
    model: ServedModel,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parallel: bool,
    ignored: Ignored,
    strict: Collection[str] = (),
) -> AnswerConstraint | None:
    """Extend the constraint for tools: to required calls, to calls as an alternative to a format, or to calls whose
    arguments fit the schema (for the tools named in `strict`).

    Raises RequestError 400 if the model cannot call tools, and for a regular expression that cannot be used.
    """
    if not tools:
        return constraint
    if model.tool_format is None:
        raise wrong("tools", f"{model.name} cannot call tools; leave out tools, or use a model that can.")
    if choice in ("required", *(tool["function"]["name"] for tool in tools)):
        wanted = [
            _expressible(tool, strict, ignored)
            for tool in tools
            if choice in ("required", tool["function"]["name"])
        ]
        return forced_calls(model.tool_format, wanted, parallel and choice == "required")
    if constraint is not None and constraint.kind == "lark":
        raise wrong("tools", "A grammar or a choice leaves no room for tool calls; leave out one of the two.")
    if constraint is not None:
        known = [_expressible(tool, strict, ignored) for tool in tools]
        try:
            return calls_or(constraint, model.tool_format, known, parallel)
        except EngineError as error:
            raise wrong("structured_outputs.regex", str(error)) from None
    return free_calls(model.tool_format, tools, strict, parallel) if strict or not parallel else None


def _expressible(tool: Mapping[str, Any], strict: Collection[str], ignored: Ignored) -> Mapping[str, Any]:
    """Return a function with the parameters that a grammar can express, unless it is strict."""
    function = tool["function"]
    if function["name"] in strict:
        return tool
    return {**tool, "function": {**function, "parameters": ignored.express(function["parameters"])}}


def strict_functions(given: Sequence[ToolDefinition] | None) -> frozenset[str]:
    """Return the names of the functions whose arguments have to fit their schema."""
    return frozenset(tool.function.name for tool in given or () if tool.function.strict)


def given_sampling(given: Struct, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the fields `names` that were given, with values that the engine accepts."""
    found = {name: value for name in names if (value := getattr(given, name)) is not None}
    if "seed" in found:
        found["seed"] %= 2**63  # seeds of other servers may be negative
    if found.get("top_k") == -1:
        found["top_k"] = 0  # vLLM's clients write -1 for all tokens
    if found.get("top_p") == 0:
        found["top_p"] = _LIKELIEST  # OpenAI's API allows 0, and Ollama and llama.cpp take it so, too
    return found


def parse_stops(given: Strings | None) -> tuple[str, ...] | None:
    """Return the stop strings; None if not given. Raises RequestError 400."""
    if given is None:
        return None
    stops = tuple(filter(None, (given,) if isinstance(given, str) else given))
    if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
        most = counted(_LONGEST_STOP, "character")
        raise wrong("stop", f"stop must be at most {counted(_MOST_STOPS, 'string')} of {most} at most.")
    return stops


def parse_logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """Return the biases by token id. Raises RequestError 400."""
    if given is None:
        return None
    try:
        bias = {int(token): float(value) for token, value in given.items() if len(token) < 12}
    except ValueError:
        raise wrong("logit_bias", "logit_bias must map token ids to numbers.") from None
    if (
        len(bias) != len(given)
        or len(bias) > 1024
        or not all(-100 <= value <= 100 for value in bias.values())
    ):
        raise wrong("logit_bias", "logit_bias must map at most 1,024 token ids to numbers from -100 to 100.")
    return bias


def parse_count(given: int | None, limits: Limits, prompts: int = 1) -> int:
    """Return the number of answers to each prompt. Raises RequestError 400."""
    count = 1 if given is None else given
    if not 1 <= count * prompts <= limits.answers or count < 1:
        raise wrong(
            "n",
            f"n is {count} for {counted(prompts, 'prompt')}; 1 to {limits.answers} answers in all are allowed.",
        )
    return count


def thinking(
    effort: str | None,
    template: Mapping[str, Any] | None,
    model: ServedModel,
    ignored: Ignored,
    place: str = "reasoning_effort",
) -> tuple[Think, dict[str, Any]]:
    """Return whether to think, and the variables for the chat template. Raises RequestError 400."""
    names = dict(template or {})
    if (reserved := next((name for name in names if name in _RESERVED), None)) is not None:
        raise wrong("chat_template_kwargs", f"chat_template_kwargs cannot contain {reserved}.")
    think: Think = "auto"
    if effort is not None:
        if effort not in _EFFORTS:
            raise wrong(place, f"{place} must be one of {', '.join(_EFFORTS)}.")
        think = _EFFORTS[effort]
        if model.thinks is False:
            ignored.add(place)
        if think == "on" and "reasoning_effort" in model.template:
            names.setdefault("reasoning_effort", effort)
    enable = names.pop("enable_thinking", names.pop("thinking", None))
    if enable is not None:
        if not isinstance(enable, bool):
            raise wrong("chat_template_kwargs", "chat_template_kwargs.enable_thinking must be true or false.")
        think = "on" if enable else "off"
    return think, names


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    return f"{prefix}{secrets.token_hex(12)}"


def usage_fields(states: Sequence[AnswerState], totals: Totals) -> dict[str, Any]:
    """Return the token counts of a request."""
    completion = sum(state.usage.completion_tokens for state in states if state.usage)
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": totals.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(state.usage.reasoning_tokens for state in states if state.usage)
        },
    }


def openai_finish_reason(state: AnswerState) -> str:
    """Return OpenAI's finish_reason. A stop string may cut off a call, which must then not be executed."""
    if state.is_incomplete:
        return "length"
    is_cut = state.reason == "stop" and (state.lost_call or not all(call.is_json for call in state.calls))
    return "tool_calls" if state.calls and not is_cut else "stop"


def named_tool(given: Any, ignored: Ignored) -> str | NamedTool | None:
    """Convert a decoded tool_choice. Raises RequestError 400."""
    if given is None or isinstance(given, str):
        return given
    return convert(given, NamedTool, "tool_choice", ignored)
