"""How a model writes calls of tools, as its chat template and its vocabulary tell."""

from typing import TYPE_CHECKING

from chatterm.server.service import ToolFormat

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


def tool_format(tokenizer: "Tokenizer") -> ToolFormat | None:
    """How a model writes calls of tools; None where its template knows none."""
    template = tokenizer.template
    if tokenizer.channels is not None:
        return None  # what it writes to tools is taken for thinking
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if "<|python_tag|>" in template or '"parameters"' in template else None


def marks_of(tokenizer: "Tokenizer") -> frozenset[int]:
    """The special tokens around calls of tools, which are text for whoever reads the calls."""
    found = (tokenizer.token_id(mark) for mark in _MARKS)
    return frozenset(id for id in found if id is not None)
