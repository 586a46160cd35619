"""The remote backend with a real `chatterm serve` and a tiny model: one chatterm chats through another."""

import pytest

from chatterm.backends.backend import ChatOptions, FinishReason
from chatterm.backends.remote.address import found
from chatterm.backends.remote.backend import RemoteBackend
from tests.chatterm.server.test_whole_way import Site, limits, site

__all__ = ["limits", "site"]


def chat(site: Site, scheme: str) -> RemoteBackend:
    address = found(f"{scheme}://{site.url.removeprefix('http://')}/tiny", {})
    assert address is not None
    backend = RemoteBackend(address, ChatOptions(system="Be brief.", sampling={"max_tokens": 20}), {})
    backend.open()
    return backend


@pytest.mark.parametrize("scheme", ["openai", "responses", "ollama"])
def test_turns_find_what_the_turns_before_have_cached(site: Site, scheme: str) -> None:
    backend = chat(site, scheme)
    site.script("The Rhine.", "It is long.")
    assert "".join(event.text for event in backend.send("Name a river.")) == "The Rhine."
    last = backend.last
    assert last is not None
    assert last.finish_reason is FinishReason.EOS
    first = last.stats
    list(backend.send("Tell me more."))
    last = backend.last
    assert last is not None
    assert last.text == "It is long."
    assert last.stats.prompt_tokens > first.prompt_tokens
    if scheme != "ollama":  # which does not tell
        # All of the turn before, question and answer: what was sent again was the same to the byte.
        assert last.stats.cached_tokens >= first.prompt_tokens + first.generated_tokens - 1
    backend.close()
