"""Calls of tools in a streamed answer: how the text is cut makes no difference, and nothing is lost."""

import json
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.server.service import ToolFormat
from chatterm.tool_calls.parser import Parser
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan
from tests.chatterm.tool_calls.writing import MARKED, TOOLS, calls, parse, said, values, written
from tests.fresh import examples

few = examples(30)
FORMATS = get_args(ToolFormat)
texts = st.text("ab\"\\'\n{}[]<>/,é😀", max_size=8)
others = st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-1e9, 1e9)
keys = st.text("xyz", min_size=1, max_size=3)


def nested(inner: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)


json_values = st.recursive(texts | others, nested, max_leaves=6)
arguments = st.fixed_dictionaries(
    {}, optional={"x": texts, "y": others, "z": nested(json_values), "xy": nested(json_values)}
).map(json.dumps)
made_calls = st.lists(st.tuples(st.sampled_from([*TOOLS]), arguments), max_size=3)
fragments = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<|start|>",
        ),
        *(
            "<|channel|>",
            "<|message|>",
            "<|call|>",
            "<|end|>",
            "<|constrain|>",
            "commentary to=functions.add ",
        ),
        *('{"name": "add", "arguments": {"a": 1}}', '{"name": "', '"arguments": {', '"parameters"', "add"),
        *(
            '{"arguments": {"a": "}"}, "name": "add"}',
            "{",
            "}",
            "[",
            "]",
            ",",
            ";",
            ":",
            '"',
            "\\",
            " ",
            "\n",
        ),
        *("<|tool_call>", "call:add{", '<|"|>', "<tool_call|>", "x:", "1", "true", "'"),
        *("<|tool_call_start|>", "add(x=", ")", "<|tool_call_end|>", "<tool_calls>", "</tool_calls>"),
        *(
            "<seed:tool_call>",
            "<function=add>",
            "<parameter=x>",
            "</parameter>",
            "</function>",
            "</seed:tool_call>",
        ),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>add"),
        *('{"name": "add", "arguments": ', '{"a": "b"}', ', "id": "x"}', "<tool", "_call>", "text", "to=x"),
    ]
)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[first:last] for first, last in pairwise(ends)]


places = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("format", FORMATS)
@few
@given(made=made_calls, text=st.sampled_from(["", "Let me look.", "a < b"]), places=places)
def test_calls_are_found_however_the_text_is_cut(format, made, text, places):
    whole = written(format, made, text)
    events = parse(format, cut(whole, places))
    assert values(events) == [(name, json.loads(given)) for name, given in made]
    if format not in MARKED:
        assert calls(events) == made
    if format != "llama3" or not made:
        assert said(events) == text


@pytest.mark.parametrize("format", FORMATS)
@few
@given(parts=st.lists(fragments, max_size=14), places=places)
def test_a_cut_changes_nothing_and_text_without_calls_is_untouched(format, parts, places):
    whole = "".join(parts)
    events = parse(format, [whole])
    assert parse(format, cut(whole, places)) == events
    assert parse(format, list(whole)) == events
    if format != "harmony" and not calls(events):
        assert said(events) == whole


@pytest.mark.parametrize("format", [format for format in FORMATS if format not in MARKED])
@few
@given(made=made_calls.filter(bool), places=places, short=st.integers(0, 200))
def test_an_answer_that_is_cut_off_loses_no_arguments(format, made, places, short):
    whole = written(format, made, "")
    whole = whole[: max(len(whole) - short, 0)]
    events = parse(format, cut(whole, places))
    for (name, given_), (expected_name, expected) in zip(calls(events), made, strict=False):
        assert name == expected_name
        assert expected.startswith(given_.rstrip("<|cal"))
    assert len(said(events)) + sum(len(given_) for _, given_ in calls(events)) <= len(whole)


@pytest.mark.parametrize("format", MARKED)
@few
@given(made=made_calls.filter(bool), places=places, short=st.integers(0, 200))
def test_of_an_answer_that_is_cut_off_a_call_without_its_end_stays_text(format, made, places, short):
    whole = written(format, made)
    whole = whole[: max(len(whole) - short, 0)]
    events = parse(format, cut(whole, places))
    complete = made[: len(calls(events))]
    assert values(events) == [(name, json.loads(given)) for name, given in complete]
    assert "".join((written(format, complete) + said(events)).split()) == "".join(whole.split())


@pytest.mark.parametrize("format", FORMATS)
@few
@given(made=made_calls.filter(bool), places=places, size=st.integers(0, 400))
def test_what_is_left_of_calls_that_a_limit_cut_is_never_text(format, made, places, size):
    whole = written(format, made)[:size]
    events = parse(format, cut(whole, places), is_forced=True, is_cut=True)
    assert parse(format, [whole], is_forced=True, is_cut=True) == events
    assert said(events) == ""
    for (name, given_), (expected_name, expected) in zip(calls(events), made, strict=False):
        assert name == expected_name
        if format not in MARKED:
            assert expected.startswith(given_.rstrip("<|cal"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Look: <tool_ca", "Look: <tool_ca"),  # it may have become anything
        ("Look: <tool_call>", "Look:"),
        ('Look: <tool_call>\n{"name": "ad', "Look:"),
        ("Look: <tool_call> is a mark, and", "Look: <tool_call> is a mark, and"),
        ('Look: <tool_call>{"name": "add", "arguments": {}}</tool', "Look:"),
        ('Look: <tool_call>{"name": "add", "arguments": {}', "Look:"),
    ],
)
def test_where_text_is_possible_a_cut_call_is_dropped_once_it_is_certain(text, expected):
    assert said(parse("hermes", list(text), is_cut=True)).rstrip() == expected


@pytest.mark.parametrize("end", ["", ", ", ', {"na', "]", "]\n</tool_"])
def test_a_list_of_calls_that_is_cut_keeps_those_that_are_complete(end):
    whole = '<tool_calls>\n[{"name": "add", "arguments": {"x": "1"}}' + end
    events = parse("hunyuan", [whole], is_cut=True)
    assert (said(events), calls(events)) == ("", [("add", '{"x": "1"}')])


def test_arguments_stream_before_the_call_is_complete():
    parser = Parser("hermes", TOOLS)
    events = parser.push('Hm <tool_call>{"name": "add", "arguments": {"a": ')
    assert events == [AnswerText("Hm"), CallBegan(0, "add"), CallArguments(0, '{"a": ')]


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', [("add", '{"a": 1}')]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [("add", '{"a": 1}')]),
        ("llama3", '{"type": "function", "name": "add", "parameters": {}}', [("add", "{}")]),
        ("llama3", '{"name": "Bob", "parameters": {"a": 1}}', []),
        ("llama3", '{"answer": 1}', []),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"b": 2}', [("add", '{"a": 1}'), ("add", '{"b": 2}')]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}', [("add", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x"}]', [("add", '{"a": 1}')]),
        ("hunyuan", '<tool_calls>[{"name": "add", "arguments": {"a": 1}}]', [("add", '{"a": 1}')]),
        ("hunyuan", '<tool_calls>[]', []),
        ("harmony", '<|start|>assistant to=functions.add<|channel|>x json<|message|>{"a": 1}', [("add", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_call(format, text, expected):
    events = parse(format, [text])
    assert calls(events) == expected
    assert said(events) == ("" if expected else text)


def test_without_tools_everything_is_text():
    parser = Parser("hermes", {})
    text = ' <tool_call>{"name": "add", "arguments": {}}</tool_call> '
    assert parser.push(text) + parser.end() == [AnswerText(text)]
