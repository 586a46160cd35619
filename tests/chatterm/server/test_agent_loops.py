"""Loops of calls and results through the openai client: what is sent back is found as it was sampled."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatterm.server.http.limits import Limits
from tests.chatterm.server.agent_formats import FORMATS, Format
from tests.chatterm.server.conftest import Served, serving
from tests.chatterm.server.test_whole_way import Site, eventually, site
from tests.models.checkpoints import tiny_qwen3

__all__ = ["site"]

CONFIG = tiny_qwen3(vocab_size=272, max_position_embeddings=4096)
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


@pytest.fixture(params=FORMATS, ids=lambda format: format.name)
def format(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def served(runtime: Path, tmp_path: Path, format: Format) -> Iterator[Served]:
    with serving(tmp_path, config=CONFIG, tokenizer=format.tokenizer()) as found:
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
    eventually(lambda: not held.users)
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


def test_a_loop_computes_only_results_and_glue(site: Site, format: Format) -> None:
    prompts = prompts_of(site)
    messages: list[Any] = [{"role": "user", "content": "What is it like outside?"}]
    with site.client as client:

        def ask(text: str) -> Any:
            says(site, text)
            return client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)

        def computed(answer: Any) -> int:
            return answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens

        glue = 90  # what the longest template writes between a call and the next answer, in letters
        for number in range(3):
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
        assert prompts[-1].count("I have to look") == (3 if format.thinks else 0)  # until there is an answer
        assert found.choices[0].message.content == "It rains."
        messages += [
            {"role": "assistant", "content": "It rains."},
            {"role": "user", "content": "And tomorrow?"},
        ]
        settle(site)
        found = ask(format.answered("It snows."))
        assert "I have to look" not in prompts[-1]
        assert "Wet" not in prompts[-1]
        if format.name != "mistral":  # it writes the tools before the last question
            assert computed(found) <= len("And tomorrow?") + glue
        site.served.engine.check()
