"""How a model writes tool calls, detected from its chat template and its vocabulary."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chatterm.tool_calls.constraint import ToolFormat
from chatterm.tool_calls.parser import AnswerText, CallArguments, CallBegan, Parser

if TYPE_CHECKING:
    from models.text.tokenizer import Tokenizer

_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
)
"""Tokens that models write around tool calls."""
_IN_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
"""The same for models whose calls are messages in a channel."""


def tool_format(tokenizer: "Tokenizer") -> ToolFormat | None:
    """Return how a model writes tool calls; None if its template has none."""
    template = tokenizer.template
    if "tools" not in template:
        return None
    if tokenizer.channels is not None:
        return "harmony" if "commentary" in template else None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if "<|python_tag|>" in template or '"parameters"' in template else None


def call_marks(tokenizer: "Tokenizer") -> frozenset[int]:
    """Return the ids of the special tokens around tool calls, which the parser needs as text."""
    found = (tokenizer.token_id(mark) for mark in (_IN_HEADERS if tokenizer.channels else _MARKS))
    return frozenset(id for id in found if id is not None)


def said_by(
    text: str, format: ToolFormat | None, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[str, Any]]]:
    """Parse an answer into its text and its calls, pairs (name, arguments as a value)."""
    parser = Parser(format, [tool["function"]["name"] for tool in tools])
    said, names, given = "", list[str](), list[str]()
    for event in parser.push(text) + parser.end():
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
