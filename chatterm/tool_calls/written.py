"""Grammars of calls that are not written in JSON: Python's (LFM2), Gemma 4's, and calls in tags (Seed-OSS, Qwen, GLM).

They enforce the names of arguments, which of them are required, and types. What no type says (patterns, limits,
references) is free in them, and so is what lies deeper than `_DEEPEST` objects.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.sampling.expressible import without_annotations
from engine.sampling.json_form import json_form

_DEEPEST = 4
_NUMBERS = (
    "INTEGER: /-?(0|[1-9][0-9]{0,18})/",
    "NUMBER: /-?(0|[1-9][0-9]{0,18})(\\.[0-9]{1,18})?([eE][-+]?[0-9]{1,2})?/",
)
_STRING = r"""STRING: /"([^"\\]|\\[\\"'nrt])*"|'([^'\\]|\\[\\"'nrt])*'/"""
_PYTHON = (
    *_NUMBERS,
    _STRING,
    'any: STRING | NUMBER | "True" | "False" | "None" | "[" (any (", " any)*)? "]"'
    ' | "{" (STRING ": " any (", " STRING ": " any)*)? "}"',
    'named: NAME "=" any',
    'anything: (named (", " named)*)?',
    "NAME: /[A-Za-z_][A-Za-z0-9_]*/",
)
_GEMMA = (
    *_NUMBERS,
    'string: ⟦<|"|>⟧ quoted',
    'quoted⟦until <|"|>⟧',
    'any: string | NUMBER | "true" | "false" | "null" | "[" (any ("," any)*)? "]" | "{" anything "}"',
    'named: NAME ":" any',
    'anything: (named ("," named)*)?',
    "NAME: /[^:{}\\[\\](),<>\"'\\s]+/",
)
RULES: dict[str, Sequence[str]] = {
    "pythonic": _PYTHON,
    "gemma4": _GEMMA,
    "seed": ("value⟦until </parameter>⟧", "key: /[^<>]+/"),
    "qwen": ("value⟦until </parameter>⟧", "key: /[^<>]+/"),
    "glm": ("value⟦until </arg_value>⟧", "key: /[^<>]+/"),
    "muse": ("value⟦until </atem:parameter>⟧", 'key: /[^<>"]+/'),
}
"""The rules that the calls of each format use, and the terminal TEXT."""
_TAGS = {
    "seed": ('"<parameter=" ', ' ">" ', '"</parameter>"', ' "\\n"'),
    "qwen": ('"<parameter=" ', ' ">\\n" ', '"\\n</parameter>"', ' "\\n"'),
    "muse": ('"<atem:parameter name=\\"" ', ' "\\">" ', '"</atem:parameter>"', ' "\\n"'),
    "glm": ("⟦<arg_key>⟧ ", " ⟦</arg_key>⟧ ⟦<arg_value>⟧ ", "⟦</arg_value>⟧", ""),
}
"""What is before a key, between it and its value, after the value, and between arguments."""


def json_rule(schema: Any) -> str:
    """Write a schema into a grammar. JSON escapes its text, so nothing in it is taken for a mark."""
    schema = without_annotations(schema)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": json_form(json.dumps(schema))}
    return f"%json {json.dumps(schema)}"


def written_call(format: str, rule: str, name: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return the rule called `rule` for one call of the function `name` with these parameters, and the rules that it
    uses besides the `RULES` of the format."""
    if format == "glm":
        return [f'{rule}: "{name}" {_tagged(format, parameters)}']
    if format == "muse":
        given = _tagged(format, parameters)
        return [f'{rule}: "<atem:invoke name=\\"" "{name}" "\\">\\n" {given} "</atem:invoke>"']
    if format in ("seed", "qwen"):
        return [f'{rule}: "<function=" "{name}" ">\\n" {_tagged(format, parameters)} "</function>"']
    rules: list[str] = []
    notation = _GEMMA_NOTATION if format == "gemma4" else _PYTHON_NOTATION
    opening, closing = "{}" if format == "gemma4" else "()"
    given = notation.members(parameters, rule, rules)
    return [f'{rule}: "{name}" "{opening}" {given} "{closing}"', *rules]


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """Return the key and the schema of each property, and whether it is required; None if there may be any."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return None
    needed = required if isinstance(required, list) else []
    return [(key, value, key in needed) for key, value in properties.items()]


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the only values that a schema allows; [] if it does not name them."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """Return the types that a schema allows; [] if it does not name them."""
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def _tagged(format: str, parameters: Mapping[str, Any]) -> str:
    before, between, after, last = _TAGS[format]
    properties = _properties(parameters)
    if properties is None:
        return f"({before}key{between}value{last})*"
    rules = []
    for key, schema, is_required in properties:
        rule = f"{before}{json.dumps(key)}{between}{_tagged_value(schema, after)}{last}"
        rules.append(rule if is_required else f"({rule})?")
    return " ".join(rules)


def _tagged_value(schema: Any, after: str) -> str:
    if not isinstance(schema, Mapping) or not schema or '"$ref"' in json.dumps(schema):
        return "value"
    if (values := _choices(schema)) and all(isinstance(value, str) for value in values):
        return f"({' | '.join(map(json.dumps, values))}) {after}"
    return "value" if "string" in _kinds(schema) else f"{json_rule(dict(schema))} {after}"


@dataclass(frozen=True, slots=True)
class _Notation:
    """How a format writes arguments and their values."""

    equals: str
    """What is between the key of an argument and its value."""
    comma: str
    string: str
    """The rule of a text."""
    quotes: str
    """The mark around a text; "" if texts are written as Python does."""
    words: Mapping[Any, str]
    """The constants."""

    def members(self, schema: Mapping[str, Any], name: str, rules: list[str], depth: int = 0) -> str:
        """Return what arguments with this schema match, in its order; add the rules that it uses, whose names begin
        with `name`."""
        properties = _properties(schema)
        if properties is None:
            return "anything"
        if self.quotes:  # Gemma's template sorts them
            properties.sort(key=lambda one: one[0].lower())
        comma, first, after = json.dumps(self.comma), "", ""
        for at, (key, inner, is_needed) in reversed([*enumerate(properties)]):
            member = f"{name}_{at}"
            rules.append(
                f"{member}: {json.dumps(key + self.equals)} {self.value(inner, member, rules, depth + 1)}"
            )
            rules.append(
                f"{member}_first: {member} {after}" + (f" | {first}" if first and not is_needed else "")
            )
            rules.append(f"{member}_after: ({comma} {member}){'' if is_needed else '?'} {after}")
            first, after = f"{member}_first", f"{member}_after"
        is_optional = not any(is_needed for _, _, is_needed in properties)
        return f"{first}{'?' if is_optional else ''}" if first else '""'

    def value(self, schema: Any, name: str, rules: list[str], depth: int) -> str:
        """Return what a value with this schema matches inside of `depth` objects and lists; add rules as `members`."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return "any"
        if values := _choices(schema):
            return "any" if any(isinstance(value, dict | list) for value in values) else self._either(values)
        kinds = [self._typed(schema, kind, name, rules, depth) for kind in _kinds(schema)]
        return f"({' | '.join(kinds)})" if kinds else "any"

    def _either(self, values: Sequence[Any]) -> str:
        return f"({' | '.join(map(self._constant, values))})"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            mark = f"⟦{self.quotes}⟧"
            return f"{mark} {json.dumps(value)} {mark}" if self.quotes else json.dumps(repr(value))
        return json.dumps(self.words[value] if value is None or isinstance(value, bool) else str(value))

    def _typed(self, schema: Mapping[str, Any], kind: Any, name: str, rules: list[str], depth: int) -> str:
        match kind:
            case "string":
                return self.string
            case "integer" | "number":
                return str(kind).upper()
            case "boolean":
                return self._either([True, False])
            case "null":
                return self._constant(None)
            case "array":
                item = self.value(schema.get("items"), f"{name}_item", rules, depth + 1)
                return f'"[" ({item} ({json.dumps(self.comma)} {item})*)? "]"'
            case "object" if self.quotes:
                return f'"{{" {self.members(schema, name, rules, depth)} "}}"'
            case _:
                return "any"


_GEMMA_NOTATION = _Notation(":", ",", "string", '<|"|>', {True: "true", False: "false", None: "null"})
_PYTHON_NOTATION = _Notation("=", ", ", "STRING", "", {True: "True", False: "False", None: "None"})
