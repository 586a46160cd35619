"""Calls of tools in a streamed answer: how the text is cut makes no difference, and nothing is lost."""

import json
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.server.service import ToolFormat
from chatterm.tool_calls.parser import AnswerText, CallArguments, CallBegan, CallEnded, Event, Parser
from tests.fresh import examples

few = examples(30)
FORMATS = get_args(ToolFormat)
TOOLS = ("get_weather", "add")


def parse(format: ToolFormat, pieces: list[str]) -> list[Event]:
    """The events, with neighbours that belong together put together."""
    parser = Parser(format, TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.end()
    merged: list[Event] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case AnswerText(before), AnswerText(more):
                merged[-1] = AnswerText(before + more)
            case CallArguments(number, before), CallArguments(same, more) if number == same:
                merged[-1] = CallArguments(number, before + more)
            case _:
                merged.append(event)
    return merged


def calls(events: list[Event]) -> list[tuple[str, str]]:
    names = {event.number: event.name for event in events if isinstance(event, CallBegan)}
    given = {event.number: event.text for event in events if isinstance(event, CallArguments)}
    assert [event.number for event in events if isinstance(event, CallEnded)] == list(range(len(names)))
    return [(name, given.get(number, "")) for number, name in names.items()]


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, AnswerText))


def written(format: ToolFormat, made: list[tuple[str, str]], text: str) -> str:
    """An answer with these calls as a model of this format writes it."""
    if format == "hermes":
        parts = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in made
        ]
        return "\n".join([text, *parts])
    if format == "llama3":
        return "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in made) or text
    if format == "mistral":
        items = ", ".join(f'{{"name": "{name}", "arguments": {given}}}' for name, given in made)
        return f"{text}[TOOL_CALLS][{items}]" if made else text
    parts = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}<|call|>"
        for name, given in made
    ]
    return f"<|channel|>final<|message|>{text}" + "<|start|>assistant".join(["", *parts])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\{}[]<>/é', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xy", max_size=2), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("xyz", min_size=1, max_size=3), json_values, max_size=3).map(json.dumps)
made_calls = st.lists(st.tuples(st.sampled_from(TOOLS), arguments), max_size=3)
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


@pytest.mark.parametrize("format", FORMATS)
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
        ("harmony", '<|start|>assistant to=functions.add<|channel|>x json<|message|>{"a": 1}', [("add", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_call(format, text, expected):
    events = parse(format, [text])
    assert calls(events) == expected
    assert said(events) == ("" if expected else text)


def test_without_tools_everything_is_text():
    parser = Parser("hermes", ())
    text = ' <tool_call>{"name": "add", "arguments": {}}</tool_call> '
    assert parser.push(text) + parser.end() == [AnswerText(text)]
