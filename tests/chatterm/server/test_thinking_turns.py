"""Long chats with a model that thinks, by clients that send everything back but the thinking."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ChatOptions
from chatterm.server.http.limits import Limits
from tests.chatterm.server.conftest import Served, serving
from tests.chatterm.server.test_agent_loops import prompts_of, says, settle
from tests.chatterm.server.test_whole_way import Site, site
from tests.engine.tiny import say

__all__ = ["site"]

THOUGHT, ANSWER = "Let me think about that. " * 2, "An answer that is longer than the glue. "
GLUE = 25


@pytest.fixture(params=["exact", "mask"])
def think_cache(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def served(runtime: Path, roomy_checkpoint: Path, think_cache: Any) -> Iterator[Served]:
    with serving(roomy_checkpoint, chat=ChatOptions(think_cache=think_cache)) as found:
        yield found


def ask(site: Site, client: Any, messages: list[Any], **more: Any) -> Any:
    engine = site.served.engine
    says(site, engine.tokenizer.decode(say(engine, THOUGHT, ANSWER), skip_special=False))
    found = client.chat.completions.create(model="tiny", messages=messages, **more)
    assert found.choices[0].message.content == ANSWER
    assert found.choices[0].message.reasoning_content.strip() == THOUGHT.strip()
    return found


def test_late_turns_compute_their_message_and_the_glue(site: Site, think_cache: str) -> None:
    messages: list[Any] = []
    with site.client as client:
        for turn in range(8):
            messages.append({"role": "user", "content": f"Turn {turn}"})
            usage = ask(site, client, messages, reasoning_effort="high" if turn % 2 else None).usage
            if turn:
                computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
                assert computed <= len(f"Turn {turn}") + GLUE
            messages.append({"role": "assistant", "content": ANSWER})
            if think_cache == "exact":
                settle(site)
    site.served.engine.check()


@pytest.mark.parametrize("think_cache", ["mask"])
def test_rows_that_were_evicted_before_the_first_token_are_done_without(site: Site) -> None:
    messages: list[Any] = [{"role": "user", "content": "One"}]
    engine = site.served.engine
    with site.client as client:
        ask(site, client, messages)
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Two"}]
        settle(site)
        held = site.served.calls.host.find("tiny")
        assert held is not None
        made, prompts = held.requests.asked, prompts_of(site)

        def asked(*arguments: Any, **more: Any) -> Any:
            found = made(*arguments, **more)
            assert found.rows.masked_until
            engine.evict_all()
            return found

        held.requests.asked = asked  # type: ignore[method-assign]
        ask(site, client, messages)
    assert len(prompts) == 2
    assert prompts[0] == prompts[1]  # its rows are others
