"""The arguments of a call: JSON that a model wrote, checked against what its tool takes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chatterm.backends.backend import Tool
from chatterm.terminal.sanitize import one_line
from chatterm.tools.tool import Tone, ToolError

MOST_CHARACTERS = 1_000_000
"""The longest arguments of one call, in characters."""
_TYPES: Mapping[str, tuple[type, str]] = {
    "string": (str, "text"),
    "integer": (int, "a whole number"),
    "boolean": (bool, "true or false"),
}


def parsed(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Raises ToolError for anything but one JSON object without repeated names."""
    if len(text) > MOST_CHARACTERS:
        raise ToolError(f"The arguments have {len(text):,} characters; {MOST_CHARACTERS:,} is the most.")
    try:
        found = json.loads(text or "{}", object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ToolError("The arguments are not a JSON object; write them as one.") from None
    if not isinstance(found, dict):
        raise ToolError("The arguments are not a JSON object; write them as one.")
    return found


def check_arguments(tool: Tool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` if each value has the type in the flat schema of a built-in tool. Raises ToolError."""
    known: Mapping[str, Any] = tool.parameters["properties"]
    for name in given:
        if name not in known:
            raise ToolError(
                f"{tool.name} has no argument {one_line(name, 40)!r}; it takes {', '.join(known)}."
            )
    for name in tool.parameters.get("required", ()):
        if name not in given:
            raise ToolError(f"{tool.name} needs the argument {name!r}.")
    for name, value in given.items():
        kind, what = _TYPES[known[name]["type"]]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ToolError(f"{name} must be {what}.")
    return dict(given)


def flat_schema(required: Sequence[str] = (), **arguments: tuple[str, str]) -> dict[str, Any]:
    """Return the schema of a built-in tool; `arguments` are the JSON type and the description of each."""
    properties = {name: {"type": kind, "description": about} for name, (kind, about) in arguments.items()}
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed}


def show_arguments(given: Mapping[str, Any]) -> tuple[tuple[str, Tone], ...]:
    """Return the lines that show every argument in full."""
    lines: list[tuple[str, Tone]] = []
    for name, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        rows = text.split("\n")
        if len(rows) == 1:
            lines.append((f"{name}: {text}", "text"))
        else:
            lines += [(f"{name}:", "text"), *((f"  {row}", "text") for row in rows)]
    return tuple(lines)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dict. Raises ValueError for repeated names, which are ambiguous."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("repeated names")
    return made
