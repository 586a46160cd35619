"""The parts of a JSON schema that no finite value matches: an answer must not begin one."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

_ROUNDS = 20
"""The most passes over the definitions to find the possible ones; a schema that needs more is left unchanged."""
_REFERENCE = re.compile(r'"\$ref": ("(?:[^"\\]|\\.)*")')
_KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def without_impossible(schema: Any) -> Any:
    """Return the schema with False for each part that nothing can match; False if nothing matches the whole.

    The library finds many of these itself, but not definitions that always lead back to themselves, such as a list
    whose `next` is required: an answer that begins one cannot end.
    """
    try:
        return _without(schema) if isinstance(schema, dict) else schema
    except RecursionError:
        return schema  # the library says what is wrong with it


def _without(schema: dict[str, Any]) -> dict[str, Any] | bool:
    known: dict[str, Any] = {"#": schema}
    known |= {f"#/{key}/{name}": part for key in _DEFINITIONS for name, part in _named(schema, key).items()}
    text = json.dumps(schema)
    references = {json.loads(found) for found in _REFERENCE.findall(text)}
    if not references <= known.keys() or text.count('"$id":') > ("$id" in schema):
        return schema  # references into parts of it, or out of it
    possible: set[str] = set()
    left = [reference for reference in known if reference in references]
    for _ in range(_ROUNDS):
        possible.update(reference for reference in left if _trimmed(known[reference], possible) is not False)
        before, left = left, [reference for reference in reversed(left) if reference not in possible]
        if len(left) == len(before):
            break
    else:
        return schema
    trimmed = _trimmed(schema, possible)
    if not isinstance(trimmed, dict):
        return False
    for key in _DEFINITIONS:
        if isinstance(trimmed.get(key), dict):
            # An impossible definition stays: nothing refers to it any more.
            trimmed[key] = {name: _trimmed(part, possible) or part for name, part in trimmed[key].items()}
    return trimmed


def _named(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _trimmed(schema: Any, possible: Collection[str]) -> Any:
    """Return a part without what nothing matches, if only `possible` references can be matched; False if all of it."""
    if not isinstance(schema, dict):
        return schema
    part = dict(schema)
    if isinstance(reference := part.get("$ref"), str):
        return part if reference in possible else False  # in older versions nothing else counts beside it
    for key in _NAMED:
        if isinstance(part.get(key), dict):
            part[key] = {name: _trimmed(value, possible) for name, value in part[key].items()}
    for key in _LISTED:
        if isinstance(part.get(key), list):
            part[key] = [_trimmed(value, possible) for value in part[key]]
    for key in _SINGLE:
        if key in part:
            part[key] = _trimmed(part[key], possible)
    if part.get("enum") == [] or False in _members(part, "allOf"):
        return False
    for key in ("anyOf", "oneOf"):
        if _members(part, key) and not any(member is not False for member in part[key]):
            return False
    return _of_possible_kinds(part)


def _members(part: Mapping[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return [member for member in value if isinstance(member, dict | bool)] if isinstance(value, list) else []


def _of_possible_kinds(part: dict[str, Any]) -> dict[str, Any] | bool:
    """Return the part without objects or arrays that require a property or an item that nothing can match."""
    kinds = part.get("type", _KINDS)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        return part  # the library says what is wrong with it
    needs = {"object": _needed_properties(part), "array": _needed_items(part)}
    left = [kind for kind in kinds if not (isinstance(kind, str) and False in needs.get(kind, ()))]
    if left == kinds:
        return part
    return {**part, "type": left} if left else False


def _needed_properties(part: Mapping[str, Any]) -> list[Any]:
    required, properties = part.get("required"), _named(part, "properties")
    names = required if isinstance(required, list) else []
    return [properties.get(name) for name in names if isinstance(name, str)]


def _needed_items(part: Mapping[str, Any]) -> list[Any]:
    count, first = part.get("minItems", 0), _members(part, "prefixItems")
    return [*first, part.get("items")][:count] if isinstance(count, int) and count > 0 else []
