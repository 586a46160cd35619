"""How a model writes tool calls, detected from its chat template and its vocabulary."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chatterm.tool_calls.constraint import ToolFormat
from chatterm.tool_calls.literals import Schemas
from chatterm.tool_calls.parser import Parser
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan

if TYPE_CHECKING:
    from models.text.tokenizer import Tokenizer

_MARKS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<tool_calls>", "</tool_calls>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>"),
    *("<|tool_call_end|>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""Tokens that models write around tool calls."""
_WRITTEN: tuple[tuple[str, ToolFormat], ...] = (
    ("[CALL_ID]", "mistral"),
    ("[ARGS]", "ministral"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma4"),
    ("<seed:tool_call>", "seed"),
    ("<parameter=", "qwen"),
    ("<arg_key>", "glm"),
    ("<tool_calls>", "hunyuan"),
    ("<|tool_call_start|>", "pythonic"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
)
"""What the template of each format contains; the first one counts."""
_IN_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
"""The same for models whose calls are messages in a channel."""


def tool_format(tokenizer: "Tokenizer") -> ToolFormat | None:
    """Return how a model writes tool calls; None if its template has none."""
    template = tokenizer.template
    if "tools" not in template:
        return None
    if "<atem:function_calls>" in template:
        return "muse"
    if tokenizer.channels is not None:
        return "harmony" if "commentary" in template else None
    written = next((format for mark, format in _WRITTEN if mark in template), None)
    if written is None and tokenizer.token_id("<|tool_call_start|>") is not None:
        return "pythonic"  # the first templates of LFM2 leave the calls to the text of answers
    return written or ("llama3" if '"parameters"' in template else None)


def call_marks(tokenizer: "Tokenizer") -> frozenset[int]:
    """Return the ids of the special tokens around tool calls, which the parser needs as text."""
    found = (tokenizer.token_id(mark) for mark in (_IN_HEADERS if tokenizer.channels else _MARKS))
    return frozenset(id for id in found if id is not None)


def schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the schema of each function's parameters, by its name."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def said_by(
    text: str,
    format: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]],
    is_forced: bool = False,
    is_cut: bool = False,
) -> tuple[str, list[tuple[str, Any]]]:
    """Parse an answer into its text and its calls, pairs (name, arguments as a value), as `Parser` does."""
    parser = Parser(format, schemas(tools), is_forced)
    said, names, given = "", list[str](), list[str]()
    for event in parser.push(text) + parser.end(is_cut):
        match event:
            case AnswerText(more):
                said += more
            case CallBegan(_, name):
                names.append(name)
                given.append("")
            case CallArguments(number, more):
                given[number] += more
            case _:
                pass
    return said, [(name, json_value(text)) for name, text in zip(names, given, strict=True)]


def json_value(text: str) -> Any:
    """Parse the JSON text of a call's arguments; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
