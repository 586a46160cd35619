"""Loops of calls and results through the openai client: what is sent back is found as it was sampled."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ChatOptions
from chatterm.server.http.limits import Limits
from tests.chatterm.server.agent_formats import FORMATS, Format
from tests.chatterm.server.conftest import Served, serving
from tests.chatterm.server.test_whole_way import Site, site
from tests.counting import until
from tests.covering import each_value_once

__all__ = ["site"]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Looks out of the window.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
                "required": ["city"],
            },
        },
    }
]
GIVEN = '{"city": "Köln \\"am\\" Rhein", "days": 2.0}'
RESULT = 'rain, 9 °C\n"wet"'


@pytest.fixture(params=FORMATS, ids=str)
def format(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture
def think_cache() -> Any:
    return "exact"


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def served(runtime: Path, roomy_checkpoint: Path, format: Format, think_cache: Any) -> Iterator[Served]:
    chat = ChatOptions(think=format.think, think_cache=think_cache)
    with serving(roomy_checkpoint, chat=chat, tokenizer=format.tokenizer()) as found:
        yield found


def says(site: Site, text: str) -> None:
    site.served.engine.scripted.script = site.served.engine.tokenizer.encode(text)


def prompts_of(site: Site) -> list[str]:
    """The prompts that are answered from now on."""
    engine, found = site.served.engine, list[str]()
    start = engine.start

    def started(rows: Any, *arguments: Any) -> Any:
        found.append(engine.tokenizer.decode(rows.token_ids, skip_special=False))
        return start(rows, *arguments)

    engine.start = started  # type: ignore[method-assign]
    return found


def settle(site: Site) -> None:
    """Wait until what the next message is sent with is there."""
    held = site.served.calls.host.find("tiny")
    assert held is not None
    until(lambda: not held.users and not held.cleanups)
    assert held.requests.settled(60)


def as_clients_write(message: Any) -> dict[str, Any]:
    """The message with its arguments in another order and with other blanks, and without what it thought."""
    calls = []
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        turned = {key: int(given[key]) if key == "days" else given[key] for key in reversed(list(given))}
        made = {"name": call.function.name, "arguments": json.dumps(turned, indent=2)}
        calls.append({"id": call.id, "type": "function", "function": made})
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


MASKED = ("hermes", "harmony", "ministral", "gemma4", "seed", "qwen")
"""Formats that think, a few of each way to mark and to show it; others have nothing to mask."""
LOOPS = [(one, "exact") for one in FORMATS] + [(one, "mask") for one in FORMATS if str(one) in MASKED]


@pytest.mark.parametrize(("format", "think_cache"), LOOPS, ids=str)
def test_a_loop_computes_only_results_and_glue(site: Site, format: Format, think_cache: str) -> None:
    prompts = prompts_of(site)
    messages: list[Any] = [{"role": "user", "content": "What is it like outside?"}]
    with site.client as client:

        def ask(text: str) -> Any:
            says(site, text)
            return client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)

        def computed(answer: Any) -> int:
            return answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens

        glue = 90  # what the longest template writes between a call and the next answer, in letters
        for number in range(2):
            found = ask(format.called("weather", GIVEN, f"I have to look, for the {number}th time."))
            choice = found.choices[0]
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert (call.function.name, call.function.arguments) == ("weather", GIVEN)
            assert not choice.message.content
            thought = getattr(choice.message, "reasoning_content", "")
            assert thought.strip() == (f"I have to look, for the {number}th time." if format.thinks else "")
            if number:
                assert computed(found) <= len(RESULT) + glue
            messages.append(as_clients_write(choice.message))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        found = ask(format.answered("It rains.", "Wet it is."))
        assert computed(found) <= len(RESULT) + glue
        is_shown = format.thinks and format.shows != "none"
        assert prompts[-1].count("I have to look") == (2 if is_shown else 0)  # until there is an answer
        assert found.choices[0].message.content == "It rains."
        messages += [
            {"role": "assistant", "content": "It rains."},
            {"role": "user", "content": "And tomorrow?"},
        ]
        if think_cache == "exact":
            settle(site)
        found = ask(format.answered("It snows."))
        if format.shows != "all":
            assert "I have to look" not in prompts[-1]
            assert "Wet" not in prompts[-1]
        if format.name != "mistral":  # it writes the tools before the last question
            assert computed(found) <= len("And tomorrow?") + glue
        site.served.engine.check()


CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": CITIES, "strict": True}}
    for name in ("weather", "map")
]


@each_value_once
@pytest.mark.parametrize("choice", ["required", "map"])
def test_a_call_that_has_to_be_made_is_made(site: Site, format: Format, choice: str) -> None:
    named: Any = {"type": "function", "function": {"name": choice}}
    with site.client as client:
        found = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Say hello."}],
            tools=STRICT,
            tool_choice=named if choice == "map" else choice,
            parallel_tool_calls=False,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},  # it would think for ever
            max_completion_tokens=300,
        )
    (made,) = found.choices
    assert (made.finish_reason, made.message.content) == ("tool_calls", None)
    (call,) = made.message.tool_calls
    assert call.function.name in (("weather", "map") if choice == "required" else ("map",))
    assert json.loads(call.function.arguments)["city"] in CITIES["properties"]["city"]["enum"]


@pytest.mark.parametrize("format", FORMATS[3:4], ids=["harmony"])
@pytest.mark.parametrize("streams", [False, True])
def test_in_channels_the_model_decides_and_its_arguments_fit(
    site: Site, format: Format, streams: bool
) -> None:
    asks: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hm?"}],
        "tools": STRICT,
    }
    # What a grammar forces is not drawn, so it is not in the script.
    thought = "<|channel|>analysis<|message|>to=functions.map, maybe<|end|>"
    with site.client as client:
        says(site, f"{thought}<|channel|>c")
        if streams:
            with client.chat.completions.stream(**asks) as stream:
                events = list(stream)
                found = stream.get_final_completion()
            deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
            assert len(deltas) > 1
        else:
            found = client.chat.completions.create(**asks)
        (call,) = found.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES["properties"]["city"]["enum"]
        says(site, f"{thought}<|channel|>fNo <call>.<|return|>")
        found = client.chat.completions.create(**asks)
        assert found.choices[0].message.content == "No <call>."
        assert found.choices[0].finish_reason == "stop"
        assert found.choices[0].message.reasoning_content == "to=functions.map, maybe"
        says(site, format.called("map", '{"city": "Rome"}', "hm"))
        found = client.chat.completions.create(**{**asks, "tool_choice": "none"})
        assert not found.choices[0].message.tool_calls


@pytest.mark.parametrize("format", [FORMATS[1], FORMATS[3]], ids=str)
def test_several_calls_of_another_model_are_told_one_by_one(site: Site, format: Format) -> None:
    """Templates that know one call a message get each with its result behind it."""
    prompts = prompts_of(site)
    calls = [
        {
            "id": f"call_{name}",
            "type": "function",
            "function": {"name": name, "arguments": f'{{"city": "{name}"}}'},
        }
        for name in ("weather", "map")
    ]
    messages: list[Any] = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Two things.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_map", "content": "a map <|im_end|>"},
        {"role": "tool", "tool_call_id": "call_weather", "content": "the weather"},
    ]
    says(site, format.answered("Fine."))
    with site.client as client:
        client.chat.completions.create(model="tiny", messages=messages, tools=STRICT)
    (prompt,) = prompts
    where = [prompt.index(text) for text in ('"weather"}', "the weather", '"map"}', "a map <|im_end|>")]
    assert where == sorted(where)


@pytest.mark.parametrize("format", FORMATS[:1], ids=["hermes"])
def test_without_thinking_the_history_is_settled_between_call_and_result(site: Site, format: Format) -> None:
    """The template opens an empty think span for an answer, and leaves it out of the history."""
    asks: dict[str, Any] = {"model": "tiny", "tools": TOOLS}
    asks["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    messages: list[Any] = [{"role": "user", "content": "What is it like outside?"}]
    with site.client as client:
        says(site, format.called("weather", GIVEN))
        found = client.chat.completions.create(messages=messages, **asks)
        (call,) = found.choices[0].message.tool_calls
        messages.append(as_clients_write(found.choices[0].message))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        settle(site)
        says(site, format.answered("It rains."))
        usage = client.chat.completions.create(messages=messages, **asks).usage
    new = "<|im_end|>\n<|im_start|>user\n<tool_response>\n\n</tool_response>assistant<think></think>"
    assert usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens <= len(RESULT) + len(new)
    assert len(format.called("weather", GIVEN)) > len(new)


@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[3]], ids=str)
def test_items_of_responses_are_found_too(site: Site, format: Format) -> None:
    tools: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    given: list[Any] = [{"role": "user", "content": "What is it like outside?"}]
    with site.client as client:
        says(site, format.called("weather", GIVEN, "I have to look for that, and it takes a while."))
        found = client.responses.create(model="tiny", input=given, tools=tools)
        (call,) = [item for item in found.output if item.type == "function_call"]
        given += [item.model_dump(exclude_none=True) for item in found.output]
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        says(site, format.answered("It rains."))
        usage = client.responses.create(model="tiny", input=given, tools=tools).usage
    assert usage.input_tokens - usage.input_tokens_details.cached_tokens <= len(RESULT) + 90
