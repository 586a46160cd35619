"""Threads that record, or wait for a GPU, take turns. Real ones do in tests/gpu/test_two_engines.py."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.kernels.recording import recording, wait_for
from tests.counting import PATIENCE

GPU = torch.device("cuda")


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes on at the fake GPU, which refuses whatever CUDA refuses while a thread is recording."""
    going_on: list[str] = []

    @contextmanager
    def busy(what: str) -> Iterator[None]:
        assert not going_on, f"{what} while {going_on} goes on"
        going_on.append(what)
        try:
            yield
        finally:
            going_on.remove(what)

    def record(graph: Any, pool: Any, capture_error_mode: str) -> Any:
        return busy("recording")

    def synchronize(device: torch.device) -> None:
        with busy("waiting"):
            pass

    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return going_on


def record_nothing() -> None:
    graph: Any = None
    with recording(graph, 0):
        pass


@pytest.mark.parametrize("other", [record_nothing, lambda: wait_for(GPU)], ids=["recording", "waiting"])
def test_another_thread_comes_after_a_recording(inside: list[str], other: Callable[[], None]) -> None:
    graph: Any = None
    done = threading.Event()

    def run() -> None:
        other()
        done.set()

    thread = threading.Thread(target=run)
    with recording(graph, 0):
        thread.start()
        assert not done.wait(0.1)
        assert inside == ["recording"]
    assert done.wait(PATIENCE), "the other thread failed"
    thread.join()


def test_the_turn_ends_with_a_recording_that_fails(inside: list[str]) -> None:
    graph: Any = None
    with pytest.raises(RuntimeError), recording(graph, 0):
        raise RuntimeError("no memory")
    thread = threading.Thread(target=record_nothing)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_waiting_for_a_cpu_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("there is no GPU"))
    wait_for(torch.device("cpu"))
