"""What a request or a terminal had is freed when it is over: no cycle of references waits for the garbage collector,
which may take minutes to come, while the room of a sampler is as large as the vocabulary."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest

from chatterm.backends.backend import ChatOptions
from chatterm.backends.failover import connect_to_server
from chatterm.backends.process import ProcessBackend
from chatterm.server.http.limits import Limits
from tests.chatterm.server.conftest import Gate
from tests.chatterm.server.test_whole_way import HELLO, Site, site
from tests.counting import until

__all__ = ["site"]

REMEMBERED = {"Turn", "Answer", "TurnStats", "Block", "Rows"}
"""Answers that may be sent back, and what is cached."""
MORE = 12
"""Requests of a kind."""


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is there already is not looked at again and again
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def alive() -> Counter[str]:
    """Objects of this project by their type."""
    rooms = ("engine.", "chatterm.")
    found = Counter(
        type(one).__qualname__ for one in gc.get_objects() if str(type(one).__module__).startswith(rooms)
    )
    return Counter({name: count for name, count in found.items() if name not in REMEMBERED})


def chats(site: Site, **more: object) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3} | more
    with httpx.stream("POST", f"{site.url}/v1/chat/completions", json=body, timeout=60) as response:
        response.read()


def rest(site: Site) -> None:
    """Wait until nothing runs any more."""
    held = site.served.calls.host.find("tiny")
    assert held is not None
    until(lambda: not held.users and not held.cleanups and not site.served.running)
    assert held.requests.settled(60)


def leaves(site: Site) -> None:
    rest(site)  # or what is left of the request before would take the steps that the gate allows
    gate = Gate(site.served.engine)
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{site.url}/v1/chat/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    gate.open()


def attaches(site: Site) -> None:
    found = connect_to_server("terminal")
    assert found is not None
    backend = ProcessBackend(found[0], "tiny", ChatOptions(sampling={"max_tokens": 3}))
    backend.open()
    list(backend.send("Name a river."))
    backend.settle()
    backend.close()


KINDS: dict[str, Callable[[Site], None]] = {
    "whole": lambda site: chats(site, seed=1),
    "streamed": lambda site: chats(site, stream=True),
    "several": lambda site: chats(site, n=3),
    "schema": lambda site: chats(site, response_format={"type": "json_object"}),
    "penalties": lambda site: chats(site, repetition_penalty=1.2, presence_penalty=0.3),
    "refused": lambda site: chats(site, messages=[{"role": "user", "content": "x" * 5000}]),
    "leaves": leaves,
    "terminal": attaches,
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left(site: Site, kind: str) -> None:
    for _ in range(3):  # what is made once
        KINDS[kind](site)
    rest(site)
    before = alive()
    for _ in range(MORE):
        KINDS[kind](site)
    rest(site)

    def grown() -> Counter[str]:
        return Counter({name: count for name, count in (alive() - before).items() if count >= MORE // 2})

    until(lambda: not grown(), pause=0.05)
