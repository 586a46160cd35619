"""Grammars of tool calls (llguidance's Lark): calls that have to be made, and calls besides a format of the answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chatterm.server.service import Constraint, ToolFormat


def forced_calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> Constraint:
    """The answer is a call of one of these tools, or several calls."""
    return Constraint("lark", f"start: calls\n{_calls(format, tools, parallel)}")


def calls_or(
    constraint: Constraint, format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool
) -> Constraint:
    """The answer is what `constraint` says, or it is calls."""
    if constraint.kind == "lark":
        return constraint  # a grammar of the client's own says all there is
    if constraint.kind == "regex":
        answer = f"answer: /{constraint.text.replace('/', chr(92) + '/')}/"
    else:
        answer = f"answer: %json {constraint.text or json.dumps({'type': 'object'})}"
    return Constraint("lark", f"start: answer | calls\n{answer}\n{_calls(format, tools, parallel)}")


_SEVERAL = {
    "hermes": 'call ("\\n" call)*',
    "llama3": 'call ("; " call)*',
    "mistral": '<[TOOL_CALLS]> "[" call (", " call)* "]"',
    "harmony": "call",
}
_ONE = {**dict.fromkeys(_SEVERAL, "call"), "mistral": '<[TOOL_CALLS]> "[" call "]"'}


def _calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    """The rule `calls` and those that it needs."""
    rules = [_call(format, tool["function"]) for tool in tools]
    names = [f"call{number}" for number in range(len(rules))]
    lines = [f"{name}: {rule}" for name, rule in zip(names, rules, strict=True)]
    many = _SEVERAL if parallel else _ONE
    return "\n".join([f"calls: {many[format]}", f"call: {' | '.join(names)}", *lines])


def _call(format: ToolFormat, function: Mapping[str, Any]) -> str:
    """One call of this function."""
    parameters = dict(function["parameters"])
    if format == "harmony":
        header = f'<|channel|> "commentary to=functions.{function["name"]} " <|constrain|> "json" <|message|>'
        return f"{header} %json {json.dumps(parameters)} <|call|>"
    key = "parameters" if format == "llama3" else "arguments"
    # References are to the root of the schema, so what they refer to has to be there.
    shared = {name: parameters.pop(name) for name in ("$defs", "definitions") if name in parameters}
    whole = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
        **shared,
    }
    written = f"%json {json.dumps(whole)}"
    return f'"<tool_call>\\n" {written} "\\n</tool_call>"' if format == "hermes" else written
