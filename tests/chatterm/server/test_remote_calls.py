"""Tools of a chat whose model is one of a real `chatterm serve`, over each of its APIs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.server.http.limits import Limits
from tests.chatterm.server.agent_formats import FORMATS
from tests.chatterm.server.conftest import Served, serving
from tests.chatterm.server.test_agent_loops import prompts_of, settle
from tests.chatterm.server.test_remote_client import chat
from tests.chatterm.server.test_remote_tools import ADD
from tests.chatterm.server.test_whole_way import Site, site

__all__ = ["site"]

HERMES = FORMATS[0]


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def served(runtime: Path, roomy_checkpoint: Path) -> Iterator[Served]:
    with serving(roomy_checkpoint, tokenizer=HERMES.tokenizer()) as found:
        yield found


@pytest.mark.parametrize("scheme", ["openai", "responses", "ollama"])
def test_a_loop_of_calls_finds_what_was_computed(site: Site, scheme: str) -> None:
    backend = chat(site, scheme)
    backend.configure({"sampling": {"max_tokens": 300}})
    backend.configure({"tools": (ADD,)})
    prompts = prompts_of(site)
    engine = site.served.engine

    def says(text: str) -> None:
        engine.scripted.script = engine.tokenizer.encode(text)

    says(HERMES.called("add", '{"a": 2}', thought="hm"))
    list(backend.send("What is 2 and 2?"))
    first = backend.last
    assert first is not None
    assert (first.text.strip(), first.reasoning.strip()) == ("", "hm")
    assert first.calls == [ToolCall("add", '{"a": 2}')]
    settle(site)
    says(HERMES.answered("It is 4."))
    list(backend.tell([ToolResult("add", '{"a": 2}', "4")]))
    second = backend.last
    assert second is not None
    assert (second.text, list(second.calls)) == ("It is 4.", [])
    assert "<tool_response>\n4\n</tool_response>" in prompts[1]
    if scheme != "responses":  # which takes what was thought only as the server made it
        assert prompts[1].startswith(prompts[0] + HERMES.called("add", '{"a": 2}', thought="hm"))
    if scheme == "openai":  # which tells
        assert second.stats.cached_tokens >= first.stats.prompt_tokens + first.stats.generated_tokens - 1
    backend.close()
