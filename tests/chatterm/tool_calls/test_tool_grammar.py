"""Grammars of calls: what they allow is found as calls, and nothing else is allowed."""

import json
from typing import get_args

import llguidance
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.server.http.fields import Ignored
from chatterm.server.service import AnswerConstraint, ToolFormat
from chatterm.tool_calls.format import schemas
from chatterm.tool_calls.grammar import calls_or, explain_refusal, forced_calls, free_calls, spell_marks
from chatterm.tool_calls.parser import Parser
from chatterm.tool_calls.reader import CallArguments, CallBegan
from engine.errors import EngineError
from engine.params import Constraint as EngineConstraint
from engine.sampling.grammar import Grammars, check
from tests.chatterm.tool_calls.writing import MARKED, written
from tests.engine.tiny import tiny_tokenizer

NESTED = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "$defs": {"Place": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": NESTED}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
WRITTEN = tuple(format for format in get_args(ToolFormat) if format != "harmony")
"""The formats whose calls do not need tokens of their own."""
IN_JSON = tuple(format for format in WRITTEN if format not in MARKED)
GO = ("go", '{"place": {"name": "Rome"}}')
STOP = ("stop", "{}")


def goes_on(constraint: AnswerConstraint, text: str) -> bool:
    """Whether an answer may begin like that."""
    grammar = llguidance.grammar_from("lark", spell_marks(constraint.text, lambda mark: None))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode())


def accepts(constraint: AnswerConstraint, text: str) -> bool:
    grammar = llguidance.grammar_from("lark", spell_marks(constraint.text, lambda mark: None))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("calls", [[GO], [STOP], [GO, STOP]])
def test_a_call_that_is_allowed_is_found(format, calls):
    text = written(format, calls)
    assert accepts(forced_calls(format, TOOLS, True), text)
    assert accepts(forced_calls(format, TOOLS, False), text) == (len(calls) == 1)
    parser = Parser(format, schemas(TOOLS))
    events = parser.push(text) + parser.end()
    assert not accepts(forced_calls(format, TOOLS, True), written(format, [("stop", '{"made": "up"}')]))
    names = [event.name for event in events if isinstance(event, CallBegan)]
    given = [event.text for event in events if isinstance(event, CallArguments)]
    assert list(zip(names, given, strict=True)) == calls


@pytest.mark.parametrize("format", IN_JSON)
def test_what_does_not_fit_is_not_allowed(format):
    forced = forced_calls(format, TOOLS, True)
    assert not accepts(forced, "Hello")
    assert not accepts(forced, "")
    assert not accepts(forced, written(format, [("run", "{}")]))
    assert not accepts(forced, written(format, [("go", '{"place": "Rome"}')]))
    assert not accepts(forced_calls(format, TOOLS[1:], True), written(format, [GO]))
    escaped = r'{"place": {"name": "Rome"}, "pl\u0061ce": 1}'
    assert not accepts(forced, written(format, [("go", escaped)]))


@pytest.mark.parametrize("format", MARKED)
def test_arguments_that_are_not_in_json_have_their_names_and_types(format):
    """In the order of their names, which is also that of the schema: templates write them so."""
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["integer", "null"]},
        "c": {"type": "array", "items": {"enum": ["é😀", "x\n'\"", 1, None]}},
        "d": {"type": "object", "properties": {"e": {"type": "boolean"}}, "required": ["e"]},
    }
    tool = {"function": {"name": "go", "parameters": {"type": "object", "properties": properties}}}
    tool["function"]["parameters"]["required"] = ["b"]
    forced = forced_calls(format, [tool], False)

    def allows(**given: object) -> bool:
        return accepts(forced, written(format, [("go", json.dumps(given))]))

    assert allows(a="it is [so], 3<4", b=-5, c=["é😀", "x\n'\"", 1, None], d={"e": True})
    assert allows(b=None)
    assert allows(b=0, d={"e": False})
    assert allows(a="", b=1)
    assert not allows(a="")
    assert not allows(a="", b=1, z=1)
    assert not allows(b="x y")
    assert not allows(b=1.5)
    assert not allows(b=1, c=["no"])
    assert not allows(b=1, c=1)
    if format != "pythonic":  # objects in arguments are free there
        assert not allows(b=1, d={"e": 1})
        assert not allows(b=1, d={})


@pytest.mark.parametrize("format", MARKED)
def test_the_size_of_a_grammar_is_that_of_the_schema(format):
    schema: dict = {"type": "string"}
    for _ in range(3):
        schema = {"type": "object", "properties": {f"p{number}": schema for number in range(12)}}
    tool = {"function": {"name": "go", "parameters": schema}}
    assert len(forced_calls(format, [tool], True).text) < 8 * len(json.dumps(schema))


NUMBER = {"type": "integer"}
LIST = {"type": "object", "properties": {"v": NUMBER, "next": {"$ref": "#/$defs/L"}}, "required": ["v"]}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"v": NUMBER, "next": {"$ref": "#"}}},
        {"properties": {"a": NUMBER, "v": {"$ref": "#/properties/a"}, "next": {"$ref": "#"}}},
        {
            "properties": {"v": {"$ref": "#n"}, "next": {"$ref": "#"}},
            "$defs": {"n": {"$anchor": "n", **NUMBER}},
        },
        {"properties": {"v": {"$ref": "n"}, "next": {"$ref": "#"}}, "$defs": {"a": {"$id": "n", **NUMBER}}},
        {"$ref": "#/$defs/L", "$defs": {"L": LIST}},
        {"$ref": "#/definitions/L", "$defs": {"L": LIST}, "definitions": {"L": LIST}},
    ],
)
@pytest.mark.parametrize(
    "head",
    [
        {},
        *({"$id": id} for id in ("https://a.b/c", "https://a.b/c#", "c", "/c/d", "#")),
        *({"$schema": f"http://json-schema.org/draft-0{draft}/schema#"} for draft in (4, 6, 7)),
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "c"},
    ],
)
@pytest.mark.parametrize("format", ["hermes", "llama3"])
def test_references_in_parameters_are_to_them(format, head, parameters):
    tool = {"function": {"name": "go", "parameters": {"type": "object", **head, **parameters}}}
    forced = forced_calls(format, [tool], False)
    assert accepts(forced, written(format, [("go", '{"v": 1, "next": {"v": 2, "next": {"v": 3}}}')]))
    assert not accepts(forced, written(format, [("go", '{"v": 1, "next": {"v": 2, "next": {"v": "3"}}}')]))
    assert not accepts(forced, written(format, [("go", '{"v": 1, "next": {"v": 2, "next": 3}}')]))


PARTS = st.sampled_from(
    [
        NUMBER,
        {"type": "null"},
        {"const": {"$ref": "#"}},
        {"$ref": "#"},
        {"$ref": "#/properties/a"},
        {"$ref": "#/$defs/d"},
    ]
)
VALUES = st.recursive(
    st.sampled_from([1, None, {"$ref": "#"}]), lambda inner: st.dictionaries(st.sampled_from("abc"), inner)
)


@given(b=PARTS, c=PARTS, d=st.sampled_from([NUMBER, {"$ref": "#"}]), value=VALUES)
def test_a_call_takes_what_its_parameters_take(b, c, d, value):
    properties = {"a": {"type": "integer"}, "b": b, "c": c}
    parameters = {
        "type": "object",
        "properties": properties,
        "$defs": {"d": d},
        "additionalProperties": False,
    }
    text = json.dumps(value, sort_keys=True)
    alone = calls_or(AnswerConstraint("json_schema", json.dumps(parameters)), "hermes", TOOLS, True)
    forced = forced_calls("hermes", [{"function": {"name": "go", "parameters": parameters}}], False)
    assert accepts(forced, written("hermes", [("go", text)])) == accepts(alone, text)


def test_what_only_looks_like_a_reference_stays():
    properties = {"$ref": {"enum": ["#/a"]}, "$id": {"const": {"$ref": "#"}}}
    parameters = {"type": "object", "properties": properties, "required": ["$ref", "$id"]}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    arguments = '{"$ref": "#/a", "$id": {"$ref": "#"}}'
    assert accepts(forced_calls("hermes", [tool], False), written("hermes", [("go", arguments)]))


@pytest.mark.parametrize("format", WRITTEN)
def test_calls_besides_a_format_of_the_answer(format):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    both = calls_or(AnswerConstraint("json_schema", json.dumps(schema)), format, TOOLS, True)
    assert accepts(both, '{"a": 1}')
    assert accepts(both, written(format, [STOP]))
    assert not accepts(both, '{"a": "b"}')
    text = calls_or(AnswerConstraint("regex", "a/b+"), format, TOOLS, True)
    assert accepts(text, "a/bb")
    assert not accepts(text, "ab")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (r"a\/b", "a/b"),
        (r"a\\/b", "a\\/b"),
        (r"a\\\/b", "a\\/b"),
        (r"[\/]{2}/", "///"),
        ("a\nb\\\nc", "a\nb\nc"),
        (r"\d⟦\\", "1⟦\\"),
        ("", ""),
    ],
)
def test_an_expression_means_the_same_besides_calls(expression, text):
    both = calls_or(AnswerConstraint("regex", expression), "hermes", TOOLS, True)
    assert accepts(both, text)
    assert accepts(both, written("hermes", [STOP]))
    assert not accepts(both, f"{text}/")


@pytest.mark.parametrize("format", get_args(ToolFormat))
@pytest.mark.parametrize("expression", ["\\", "ab\\", "a\\\\\\", "\\n\\"])
def test_an_expression_without_an_end_is_refused_as_it_is_without_tools(format, expression):
    with pytest.raises(EngineError) as alone:
        check(EngineConstraint("regex", expression))
    with pytest.raises(EngineError) as besides:
        calls_or(AnswerConstraint("regex", expression), format, TOOLS, True)
    assert str(alone.value) == str(besides.value)
    assert "regular expression cannot be used: it ends in a backslash" in str(alone.value)


@pytest.mark.parametrize("format", WRITTEN)
def test_calls_after_any_text(format):
    free = free_calls(format, TOOLS, {"go"}, True)
    once = free_calls(format, TOOLS, {"go"}, False)
    lead = "" if format == "llama3" else "Let me <see>.\n"
    for text in ("", "Hello", lead + written(format, [GO]), lead + written(format, [STOP])):
        assert accepts(free, text)
        assert accepts(once, text)
    assert accepts(free, lead + written(format, [GO, STOP]))
    assert not accepts(once, lead + written(format, [GO, STOP]))
    if format in IN_JSON:
        assert not accepts(free, lead + written(format, [("go", '{"place": "Rome"}')]))
    assert not accepts(free, lead + written(format, [("run", "{}")]))
    lenient = ("stop", '{"anything": 1}')
    assert accepts(free, lead + written(format, [lenient]))


def test_calls_after_any_text_where_marks_are_tokens():
    for format, mark in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")):
        constraint = free_calls(format, TOOLS, {"go"}, True)
        assert "lead: TEXT? <[9]>" in spell_marks(constraint.text, {mark: 9}.get)
        text = spell_marks(constraint.text, {}.get)
        assert "suffix=" in text
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.grammar_from("lark", text))
        assert not matcher.is_error(), matcher.get_error()
    assert free_calls("harmony", TOOLS, set(), False) is None


@pytest.mark.parametrize("more", [0, 5000])
def test_a_choice_is_one_of_them(more):
    from chatterm.server.http.openai.common import StructuredOutputs, parse_constraint

    choices = [
        "yes",
        'no "really"',
        "é\n",
        "a/b",
        "\\d",
        "[c]",
        "(",
        "x|y",
        "\0",
        "\u2028😀",
        "  ",
        "yes, yes",
    ]
    choices += map(str, range(more))
    constraint = parse_constraint(None, StructuredOutputs(choice=choices), Ignored())
    for choice in choices[:20]:
        assert accepts(constraint, choice)
    for other in ("maybe", "", "ye", "yes,", "yesyes", "5", "c", "x", "é\\n", " ", "  y"):
        assert accepts(constraint, other) == (more > 0 and other == "5")


@pytest.mark.parametrize("format", get_args(ToolFormat))
def test_what_is_wrong_is_said_of_what_was_asked(format):
    def said(constraint):
        grammar = EngineConstraint("lark", spell_marks(constraint.text, {}.get))
        with pytest.raises(EngineError) as caught:
            check(grammar)
        return explain_refusal(str(caught.value), constraint.text)

    bad = {"function": {"name": "wait", "parameters": {"properties": {"a": {"not": {"type": "null"}}}}}}
    unknown = 'cannot be used: Unimplemented keys: ["not"].'
    if format not in ("gemma4", "pythonic"):
        assert said(forced_calls(format, [*TOOLS, bad], True)) == f"The parameters of wait {unknown}"
        assert said(free_calls(format, [bad, *TOOLS], {"wait"}, True)) == f"The parameters of wait {unknown}"
    schema = AnswerConstraint("json_schema", '{"not": {"type": "null"}}')
    assert said(calls_or(schema, format, TOOLS, True)) == f"The JSON schema {unknown}"
    expression = calls_or(AnswerConstraint("regex", "(a"), format, TOOLS, True)
    assert said(expression).endswith("the parameters of a function cannot be used: unclosed group.")
    deep: dict = {}
    for _ in range(300):
        deep = {"items": deep}
    nested = {"function": {"name": "wait", "parameters": deep}}
    if format not in MARKED:
        assert said(forced_calls(format, [nested], True)).endswith("it is nested too deeply.")
    assert explain_refusal("The model has ended.", schema.text) is None


@pytest.mark.parametrize("format", IN_JSON)
def test_a_parameter_that_nothing_matches_is_never_given(format):
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/node"}},
        "additionalProperties": False,
    }
    parameters["$defs"] = {"node": node}
    tool = {"function": {"name": "go", "parameters": parameters}}
    assert accepts(forced_calls(format, [tool], False), written(format, [("go", "{}")]))
    begun = written(format, [("go", '{"a": {"next": 1}}')])
    assert not goes_on(forced_calls(format, [tool], False), begun[: begun.index('": {"next')])
    answer = calls_or(AnswerConstraint("json_schema", json.dumps(parameters)), format, TOOLS, False)
    assert accepts(answer, "{}")
    assert not goes_on(answer, '{"a')


@pytest.mark.parametrize("format", IN_JSON)
def test_parameters_that_nothing_matches_are_refused(format):
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    tool = {"function": {"name": "wait", "parameters": node}}
    grammar = forced_calls(format, [*TOOLS, tool], True).text
    with pytest.raises(EngineError) as caught:
        check(EngineConstraint("lark", spell_marks(grammar, {}.get)))
    assert explain_refusal(str(caught.value), grammar).startswith("The parameters of wait cannot be used: ")


def test_marks_are_tokens_where_they_are_and_text_elsewhere():
    text = forced_calls("mistral", TOOLS, True).text
    assert '"[TOOL_CALLS]" "["' in spell_marks(text, {}.get)
    assert '<[9]> "["' in spell_marks(text, {"[TOOL_CALLS]": 9}.get)
    known = {"<|channel|>": 1, "<|constrain|>": 2, "<|message|>": 3, "<|call|>": 4}
    text = spell_marks(forced_calls("harmony", TOOLS, True).text, known.get)
    assert all(f"<[{id}]>" in text for id in known.values())
    assert "⟦" not in text


def test_what_people_write_is_no_mark():
    parameters = {"type": "object", "properties": {"a": {"enum": ["⟦<tool_call>⟧"]}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    constraint = forced_calls("llama3", [tool], False)
    assert spell_marks(constraint.text, {"<tool_call>": 9}.get) == constraint.text


@pytest.mark.parametrize("format", ["mistral", "harmony"])
def test_the_other_formats_are_grammars(format):
    grammar = llguidance.grammar_from("lark", spell_marks(forced_calls(format, TOOLS, True).text, {}.get))
    assert not llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar).is_error()


def test_only_the_mark_itself_may_begin_a_call():
    tokenizer = tiny_tokenizer()
    special = [id for id in range(tokenizer.vocab_size) if not tokenizer.is_text(id)]
    assert len(special) > 2
    mark = special[1]
    text = calls_or(AnswerConstraint("json_object"), "hermes", TOOLS, True).text
    matcher = Grammars(tokenizer, 272).matcher(
        EngineConstraint("lark", spell_marks(text, {"<tool_call>": mark}.get))
    )
    words = np.zeros(9, dtype=np.int32)
    matcher.fill(words)
    allowed = {id for id in range(272) if words[id // 32] >> id % 32 & 1}
    assert mark in allowed
    assert not allowed & (set(range(tokenizer.vocab_size, 272)) | set(special)) - {mark}
    matcher.push(mark)
