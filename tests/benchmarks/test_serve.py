"""The benchmark of servers, run on a scripted server: its counts are right."""

import argparse

import pytest

from benchmarks.peers.serving import Workload
from benchmarks.serve import Site, ask, chat, load, percentile, told
from tests.chatterm.server.fake import FakeService, serving


@pytest.fixture(scope="module")
def url():
    def say(request, index):
        return [("reasoning", "Hm. "), ("answer", "one two three")]

    with serving(FakeService(say=say)) as running:
        yield running.url


CHAT = "/v1/chat/completions"


def asked(model="tiny"):
    return {"model": model, "messages": [{"role": "user", "content": "a b c d"}], "max_tokens": 10}


async def test_an_answer_is_read(url):
    answer = await ask(url, CHAT, asked())
    assert (answer.text, answer.tokens) == ("one two three", 4)
    assert (answer.prompt_tokens, answer.cached_tokens) == (4, 2)
    assert answer.first_s > 0
    assert len(answer.gaps_s) <= 3
    assert all(gap > 0 for gap in answer.gaps_s)


async def test_a_refusal_is_no_answer(url):
    with pytest.raises(ValueError, match="model_not_found"):
        await ask(url, CHAT, asked("nothing"))


async def test_many_clients_and_a_chat(url):
    site = Site("chatterm", url, "tiny")
    found = await load(site, Workload([[1, 2]] * 6, [4] * 6, 3, 0.6))
    assert (found.clients, found.requests) == (3, 6)
    assert found.tokens_per_s > 0
    assert 0 < found.first_p50_s <= found.first_p99_s
    assert 0 <= found.token_p50_s <= found.token_p99_s
    turns = await chat(site, 2, 10)
    assert turns[1].prompt_tokens > turns[0].prompt_tokens
    assert all(turn.computed_tokens == turn.prompt_tokens - turn.prompt_tokens // 2 for turn in turns)
    line = told("tiny", turns)
    assert line.startswith(f"tiny: turn 2 of a chat: {turns[1].prompt_tokens} prompt tokens,")
    assert f" {turns[1].computed_tokens} computed ({turns[1].computed_tokens} at most" in line
    assert line.endswith(f"{sum(turn.thinking_tokens for turn in turns)} tokens of thinking in all")


def test_peers_are_named():
    assert Site.of("vLLM=http://127.0.0.1:8123/tmp/x") == Site("vLLM", "http://127.0.0.1:8123", "tmp/x", True)
    with pytest.raises(argparse.ArgumentTypeError):
        Site.of("http://127.0.0.1:8123")


def test_percentiles():
    assert percentile(range(100), 50) == 50
    assert percentile(range(100), 99) == 99
    assert percentile([], 99) == 0.0
