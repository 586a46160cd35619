"""Parses what answers have to match, from the command line or a line of a batch."""

import json
from pathlib import Path
from typing import Any

from chatterm.cli.options import check_utf8
from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError
from engine.params import MOST_CHARACTERS, Constraint

_FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
)


def parse_constraint(schema: str | None, json_object: bool, regex: str | None) -> Constraint | None:
    """Return the constraint of --schema, --json-object or --regex; None without any of them. Raises WrongUsage."""
    names = {"--schema": schema is not None, "--json-object": json_object, "--regex": regex is not None}
    if sum(names.values()) > 1:
        chosen = [name for name, is_given in names.items() if is_given]
        raise WrongUsage(f"{' and '.join(chosen)} cannot be combined; use one of them.")
    try:
        if schema is not None:
            constraint = Constraint("json_schema", _content(schema))
        elif regex is not None:
            check_utf8(regex)
            constraint = Constraint("regex", regex)
        elif json_object:
            constraint = Constraint("json_object")
        else:
            return None
        from engine.sampling.grammar import check

        check(constraint)
    except EngineError as error:
        raise WrongUsage(one_line(str(error), 400)) from error
    return constraint


def _content(name: str) -> str:
    path = Path(name)
    try:
        with path.open("rb") as file:
            return file.read(4 * MOST_CHARACTERS + 1).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise WrongUsage(
            f"{one_line(name, 200)} is not UTF-8 text; name a file with a JSON schema."
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise WrongUsage(
            f"{one_line(name, 200)} cannot be read ({why}); name a file with a JSON schema."
        ) from None


def constraint_from_format(value: Any) -> Constraint | None:
    """Return the constraint of a `response_format` like OpenAI's; None for plain text. Raises EngineError."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_object")
    inner = value.get("json_schema") if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise EngineError(f"response_format must be {_FORMATS}.")
    return Constraint("json_schema", json.dumps(schema))
