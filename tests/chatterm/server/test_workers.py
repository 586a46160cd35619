"""Threads for the work around answers: whose turn it is, and what is never in whose way."""

import threading
from collections.abc import Iterator

import pytest

from chatterm.server.process.workers import Workers
from tests.counting import PATIENCE


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


def test_clients_take_turns_with_long_work_which_never_holds_up_short_work(workers: Workers) -> None:
    has_begun, may_end, order = threading.Event(), threading.Event(), list[str]()

    def wait() -> None:
        has_begun.set()
        may_end.wait(PATIENCE)

    first = workers.submit("a", wait, is_long=True)
    assert has_begun.wait(PATIENCE)
    asked = ["a1", "a2", "a3", "b1", "b2", "c1"]
    rest = [workers.submit(name[0], order.append, name, is_long=True) for name in asked]
    for client in "abcdef":
        assert workers.submit(client, lambda: "short").result(PATIENCE) == "short"
    assert order == []
    may_end.set()
    for one in (first, *rest):
        one.result(PATIENCE)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_fails_is_told_and_the_thread_goes_on(workers: Workers) -> None:
    failed = workers.submit("a", int, "x", is_long=True)
    assert workers.submit("a", int, "1", is_long=True).result(PATIENCE) == 1
    assert isinstance(failed.exception(PATIENCE), ValueError)
    workers.close()
    with pytest.raises(RuntimeError):
        workers.submit("a", int)
