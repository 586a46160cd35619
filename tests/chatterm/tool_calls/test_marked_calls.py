"""Calls that are not written in JSON: what is read, and that everything else stays text and takes no time."""

import pytest

from chatterm.tool_calls.literals import typed
from chatterm.tool_calls.parser import Parser
from chatterm.tool_calls.reader import CallArguments, CallBegan, CallEnded
from tests.chatterm.tool_calls.writing import MARKED, TOOLS, calls, parse, said, written

MARKS = {
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
    "qwen": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>"),
    "muse": ("<atem:function_calls>", "</atem:function_calls>"),
}
X = ('<atem:parameter name="x">', "</atem:parameter>")
NO_CONSTANTS = [
    *("f()", "1 + 1", "[1 for x in y]", "x", "f'{x}'", "b'x'", "__import__('os')", "1j", "", "...", "{1, 2}", "*x"),
    *("lambda: 0", "'\\ud800'", "'\\U00110000'", "'\\xzz'", "9" * 500, "1e999", "[" * 80 + "]" * 80, "'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "body", "expected"),
    [
        ("gemma4", "call:add{}", [("add", "{}")]),
        ("gemma4", 'call: add { "a" : 1, b:{c:[true,null,],}, } ', [("add", '{"a": 1, "b": {"c": [true, null]}}')]),
        ("gemma4", 'call:add{a:<|"|>}<tool_call|>"<|"|>}', [("add", '{"a": "}<tool_call|>\\""}')]),
        ("gemma4", 'call:add{a:1', []),
        ("gemma4", 'add{a:1}', []),
        ("gemma4", 'call:add{a:1,a:2}', []),
        ("gemma4", 'call:add{a:open("x")}', []),
        ("pythonic", "[add()]", [("add", "{}")]),
        ("pythonic", "add(a=1)", [("add", '{"a": 1}')]),
        ("pythonic", "[add(a=-1.5e3, b=(1, None))]", [("add", '{"a": -1500.0, "b": [1, null]}')]),
        ("pythonic", "[add(c={'d': True}), add()]", [("add", '{"c": {"d": true}}'), ("add", "{}")]),
        ("pythonic", "[add(a='it's \\'so\\'')]", [("add", '{"a": "it\'s \'so\'"}')]),
        ("pythonic", '[add(b="\\u00e9\\x41\\n")]', [("add", '{"b": "éA\\n"}')]),
        ("pythonic", "[add(a='<|tool_call_end|>)]')]", [("add", '{"a": "<|tool_call_end|>)]"}')]),
        ("pythonic", "[math.add(a=1)]", [("math.add", '{"a": 1}')]),
        *(("pythonic", f"[add(a={value})]", []) for value in NO_CONSTANTS),
        ("pythonic", "[]", []),
        ("pythonic", "[add(1)]", []),
        ("pythonic", "[add(**{'a': 1})]", []),
        ("pythonic", "[add(a=1)", []),
        ("pythonic", "[add(a=1)]; add()", []),
        ("seed", "<function=add></function>", [("add", "{}")]),
        *(
            ("seed", f"<function=add><parameter={key}>{text}</parameter></function>", [("add", given)])
            for key, text, given in (
                ("x", "1", '{"x": "1"}'),
                ("y", "1", '{"y": 1}'),
                ("x", "a</seed:tool_call>b", '{"x": "a</seed:tool_call>b"}'),
                ("y", "{'a': True}", '{"y": {"a": true}}'),
                ("y", "NaN", '{"y": "NaN"}'),
                ("y", '"\\ud800"', '{"y": "\\"\\\\ud800\\""}'),
            )
        ),
        ("seed", "<function=add><parameter=y>1</function>", []),
        ("seed", "add", []),
        ("qwen", "\n<function=add>\n</function>\n", [("add", "{}")]),
        *(
            ("qwen", f"\n<function=add>\n<parameter=x>{text}</parameter>\n</function>\n", [("add", given)])
            for text, given in (
                ("\n1\n", '{"x": "1"}'),
                ("\n\n a\nb \n\n", '{"x": "\\n a\\nb \\n"}'),
                ("a", '{"x": "a"}'),
                ("\n</tool_call>\n", '{"x": "</tool_call>"}'),
            )
        ),
        ("qwen", '\n{"name": "add", "arguments": {}}\n', []),
        ("glm", "add\n<arg_key>x</arg_key>\n<arg_value>a\nb</arg_value>\n", [("add", '{"x": "a\\nb"}')]),
        ("glm", "add", [("add", "{}")]),
        ("glm", "add stop", []),
        ("muse", '<atem:invoke name="add"></atem:invoke>' * 2, [("add", "{}"), ("add", "{}")]),
        ("muse", f'<atem:invoke name="add">{" 1 ".join(X)}</atem:invoke>', [("add", '{"x": " 1 "}')]),
        ("muse", '<atem:invoke name="add">x</atem:invoke>', []),
        ("muse", "", []),
        ("glm", '{"name": "add"}', []),
        ("glm", "add<arg_key>x</arg_key>", []),
    ],
)  # fmt: skip
def test_only_what_is_a_call_is_one(format, body, expected):
    """`body` is what is between the marks."""
    text = body.join(MARKS[format])
    events = parse(format, [text])
    assert calls(events) == expected
    assert said(events) == ("" if expected else text)


def test_the_header_of_a_call_is_no_text_and_that_of_a_message_is_lost_never():
    call = written("muse", [("add", '{"x": "a"}')])
    events = parse("muse", [*(" to=add<|message|>" + call)])
    assert (calls(events), said(events)) == ([("add", '{"x": "a"}')], "")
    for text in (
        " to=add<|message|>prose",
        " to=add",
        " to=add<|message|><atem:function_calls>broken",
        " together",
    ):
        assert said(parse("muse", [*text])) == text


@pytest.mark.parametrize("format", MARKED)
def test_a_call_that_has_to_be_complete_is_announced(format):
    whole = written(format, [("add", '{"y": 1}')])
    parser = Parser(format, TOOLS)
    found = [(parser.push(char), parser.is_calling) for char in "Hm " + whole]
    first = next(at for at, (_, is_calling) in enumerate(found) if is_calling)
    assert all(is_calling for _, is_calling in found[first:-1])
    assert whole[: first - 3 + 1].endswith(">")
    assert not parser.is_calling
    assert [event for events, _ in found for event in events][-3:] == [
        CallBegan(0, "add"),
        CallArguments(0, '{"y": 1}'),
        CallEnded(0),
    ]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        ({"type": "number"}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "array"}, "['a', 'b']", ["a", "b"]),
        ({"type": "object"}, "not an object", "not an object"),
        ({"type": 5}, "1", 1),
        (True, "1", 1),
        ({}, "9" * 5000, "9" * 5000),
    ],
)
def test_the_schema_says_what_a_text_without_quotes_is(schema, text, value):
    assert typed(text, schema) == value


@pytest.mark.parametrize("format", MARKED)
def test_what_is_no_call_takes_no_time(format):
    """Closing marks in strings, deep brackets, and many calls: each is read a limited number of times."""
    opening, closing = {
        "gemma4": ("<|tool_call>", "<tool_call|>"),
        "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
        "seed": ("<seed:tool_call>", "</seed:tool_call>"),
        "qwen": ("<tool_call>", "</tool_call>"),
        "glm": ("<tool_call>", "</tool_call>"),
        "muse": ("<atem:function_calls>", "</atem:function_calls>"),
    }[format]
    begun = {
        "gemma4": 'call:add{x:<|"|>',
        "pythonic": "[add(x='",
        "seed": "<function=add><parameter=x>",
        "qwen": "<function=add>\n<parameter=x>\n",
        "muse": '<atem:invoke name="add"><atem:parameter name="x">',
        "glm": "add<arg_key>x</arg_key><arg_value>",
    }[format]
    for more in (closing, "[" * 100, "a", opening, '<|"|>', "\\"):
        whole = opening + begun + more * (100_000 // len(more))
        assert said(parse(format, [whole])) == whole
