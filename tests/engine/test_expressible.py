"""What a grammar can express of the schemas that common generators write, and what is told of the rest."""

import json
from typing import Any

import pytest

from engine.errors import EngineError
from engine.params import Constraint
from engine.sampling.expressible import expressible, without_annotations
from engine.sampling.grammar import check

DECIMAL = "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"


def is_taken(schema: Any) -> bool:
    try:
        check(Constraint("json_schema", json.dumps(schema)))
    except EngineError:
        return False
    return True


@pytest.mark.parametrize(
    "schema",
    [
        *(
            {"type": "string", "format": name}
            for name in ("file-path", "binary", "password", "path", "made-up")
        ),
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        {"type": "object", "properties": {"format": {"type": "string"}, "not": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"not": {}}}},
        {"enum": [{"format": "made-up", "uniqueItems": True}]},
    ],
)
def test_what_forbids_nothing_is_taken_as_it_is(schema: Any) -> None:
    whole = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    assert is_taken(whole)
    assert expressible(whole) == (without_annotations(whole), frozenset())


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, {"uniqueItems"}),
        ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, {"pattern"}),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, {"propertyNames"}),
        ({"type": "string", "pattern": "^(a)\\1$"}, {"pattern"}),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, {"if", "then"}),
        (
            {"type": "object", "patternProperties": {"^(?=x)": {}}, "additionalProperties": False},
            {"patternProperties"},
        ),
    ],
)
def test_what_no_grammar_can_express_has_a_name(schema: Any, left_out: set[str]) -> None:
    whole = {"$defs": {"v": schema}, "type": "object", "properties": {"v": {"$ref": "#/$defs/v"}}}
    assert not is_taken(whole)
    found, names = expressible(whole)
    assert is_taken(found)
    assert names == left_out


@pytest.mark.parametrize("pattern", ["^ab+$", "^\\(?!$", "^(?:a|b)$", "^(?i)a$", "\\\\1"])
def test_other_expressions_stay(pattern: str) -> None:
    assert expressible({"pattern": pattern}) == ({"pattern": pattern}, frozenset())


def test_what_nothing_matches_is_refused() -> None:
    assert not is_taken({"type": "object", "properties": {"v": {"not": {}}}, "required": ["v"]})
