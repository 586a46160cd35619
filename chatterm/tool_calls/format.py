"""How a model writes calls of tools, as its chat template and its vocabulary tell."""

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
"""Tokens that models write around the calls of tools."""
_IN_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
"""The same where a call is a message in a channel."""


def tool_format(tokenizer: "Tokenizer") -> ToolFormat | None:
    """How a model writes calls of tools; None where its template knows none."""
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
    """The special tokens around calls of tools, which are text for whoever reads the calls."""
    found = (tokenizer.token_id(mark) for mark in (_IN_HEADERS if tokenizer.channels else _MARKS))
    return frozenset(id for id in found if id is not None)


def said_by(
    text: str, format: ToolFormat | None, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[str, Any]]]:
    """What a client reads of an answer: its text, and its calls with their arguments as values."""
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
    """What the JSON text of a call's arguments says; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
