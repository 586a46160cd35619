"""The part of a JSON schema that a grammar can express. The rest is either an annotation, or has a name to tell."""

import re
from typing import Any

FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
})  # fmt: skip
"""The formats that llguidance enforces. Others are annotations, as the standard has it."""
INEXPRESSIBLE = frozenset({
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "propertyNames", "uniqueItems", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""The constraints that llguidance does not know."""
_FREE: dict[str, tuple[Any, ...]] = {
    "propertyNames": ({}, True, {"type": "string"}),
    "uniqueItems": (False,),
    "not": (False,),
}
"""Their values that forbid nothing."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties")
_ESCAPED = re.compile(r"\\[^1-9]", re.DOTALL)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")


def without_annotations(schema: Any) -> Any:
    """Return the schema without what forbids nothing, though llguidance refuses it."""
    return _walked(schema, None)


def expressible(schema: Any) -> tuple[Any, frozenset[str]]:
    """Return the schema without the constraints that no grammar can express, and their names."""
    left_out = set[str]()
    return _walked(schema, left_out), frozenset(left_out)


def _walked(schema: Any, left_out: set[str] | None) -> Any:
    try:
        return _part(schema, left_out)
    except RecursionError:
        return schema  # the library says what is wrong with it


def _part(schema: Any, left_out: set[str] | None) -> Any:
    """Return a part without annotations; unless `left_out` is None, without what no grammar can express."""
    if not isinstance(schema, dict):
        return schema
    if "not" in schema and schema["not"] in ({}, True):
        return False  # nothing matches
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: _part(one, left_out) for name, one in value.items()}
        elif key in _LISTED and isinstance(value, list):
            made[key] = [_part(one, left_out) for one in value]
        elif key in _SINGLE:
            made[key] = _part(value, left_out)
        elif (key == "format" and value not in FORMATS) or value in _FREE.get(key, ()):
            continue
        elif left_out is not None and (key in INEXPRESSIBLE or (key == "pattern" and _looks_around(value))):
            left_out.add(key)
        else:
            made[key] = value
    names = [name for name in made.get("patternProperties") or () if _looks_around(name)]
    if names and left_out is not None:
        left_out.add("patternProperties")
        made["patternProperties"] = {k: v for k, v in made["patternProperties"].items() if k not in names}
        made.pop("additionalProperties", None)  # it counts for what no pattern matches
    return made


def _looks_around(pattern: Any) -> bool:
    """Return whether an expression looks ahead or behind, or refers to a group; the library has neither."""
    return isinstance(pattern, str) and _LOOKS_AROUND.search(_ESCAPED.sub("", pattern)) is not None
