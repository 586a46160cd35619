"""What requests ask for, as the engine knows it."""

from pathlib import Path

import pytest

from chatterm.server.process.request_parsing import parse_sampling, template_message
from chatterm.server.service import ChatMessage, Generation, HistoryToolCall
from chatterm.tool_calls.format import call_marks, said_by, tool_format
from tests.engine.tiny import TEMPLATE, harmony_tokenizer, tiny_engine, tiny_tokenizer


def test_messages_are_what_templates_know() -> None:
    calls = (HistoryToolCall("c1", "look", '{"where": "here"}'), HistoryToolCall("c2", "look", "no json"))
    made = template_message(ChatMessage("assistant", "", reasoning="hm", tool_calls=calls))
    assert made["reasoning_content"] == "hm"
    functions = [call["function"] for call in made["tool_calls"]]
    assert [function["arguments"] for function in functions] == [{"where": "here"}, "no json"]
    assert template_message(ChatMessage("developer", "x")) == {"role": "system", "content": "x"}
    assert template_message(ChatMessage("tool", "x", tool_call_id="c1", name="look"))["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (TEMPLATE, None),
        (TEMPLATE + "{{ tools }}<tool_call>", "hermes"),
        (TEMPLATE + "{{ tools }}[TOOL_CALLS]", "mistral"),
        (TEMPLATE + '{{ tools }}{"name": x, "parameters": y}', "llama3"),
    ],
)
def test_the_template_tells_how_tools_are_called(template: str, format: str | None) -> None:
    assert tool_format(tiny_tokenizer(template)) == format


def test_marks_around_calls() -> None:
    assert call_marks(tiny_tokenizer()) == frozenset()
    harmony = harmony_tokenizer()
    assert tool_format(harmony) == "harmony"
    names = ("start", "channel", "constrain", "message")
    assert call_marks(harmony) == {harmony.token_id(f"<|{name}|>") for name in names}


def test_what_a_client_reads_of_an_answer() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = 'So: <tool_call>\n{"name": "f", "arguments": {"a": [1, "b"]}}\n</tool_call>'
    assert said_by(text, "hermes", tools) == ("So:", [("f", {"a": [1, "b"]})])
    assert said_by(text, "hermes", ()) == (text, [])
    assert said_by('<tool_call>{"name": "f", "arguments": {"a"', "hermes", tools) == ("", [("f", '{"a"')])


def test_an_answer_without_an_end(checkpoint: Path) -> None:
    with tiny_engine(checkpoint) as engine:
        request = Generation(model="tiny", prompt="x", sampling={"ignore_eos": True, "logit_bias": {5: 1.0}})
        bias = parse_sampling(engine, request).logit_bias
        assert bias == {5: 1.0, **dict.fromkeys(engine.tokenizer.stop_ids, -100.0)}
