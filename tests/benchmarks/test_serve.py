"""The benchmark of servers on one that says what it is told: its counts are right."""

import pytest

from benchmarks.serve import ask, chat, load, percentile, told
from tests.chatterm.server.fake import FakeService, serving


@pytest.fixture(scope="module")
def url():
    def say(request, index):
        return [("reasoning", "Hm. "), ("answer", "one two three")]

    with serving(FakeService(say=say)) as running:
        yield running.url


async def test_an_answer_is_read(url):
    answer = await ask(url, "tiny", [{"role": "user", "content": "a b c d"}], 10, 1)
    assert (answer.text, answer.tokens) == ("one two three", 4)
    assert (answer.prompt_tokens, answer.cached_tokens) == (4, 2)
    assert answer.first_s > 0
    assert len(answer.gaps_s) == 3


async def test_a_refusal_is_no_answer(url):
    with pytest.raises(ValueError, match="model_not_found"):
        await ask(url, "nothing", [{"role": "user", "content": "a"}], 10, 1)


async def test_many_clients_and_a_chat(url):
    found = await load(url, "tiny", 3, 2, 10, 10)
    assert (found.clients, found.requests) == (3, 6)
    assert found.tokens_per_s > 0
    assert 0 < found.first_p50_s <= found.first_p99_s
    turns = await chat(url, "tiny", 2, 10)
    assert turns[1].prompt_tokens > turns[0].prompt_tokens
    assert all(turn.computed_tokens == turn.prompt_tokens - turn.prompt_tokens // 2 for turn in turns)
    line = told("tiny", turns)
    assert line.startswith(f"turn 2 of a chat with tiny: {turns[1].prompt_tokens} prompt tokens,")
    assert f" {turns[1].computed_tokens} computed ({turns[1].computed_tokens} at most" in line
    assert line.endswith(f"{sum(turn.thinking_tokens for turn in turns)} tokens of thinking in all")


def test_percentiles():
    assert percentile(range(100), 50) == 50
    assert percentile(range(100), 99) == 99
    assert percentile([], 99) == 0.0
