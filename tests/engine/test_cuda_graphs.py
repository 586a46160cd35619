"""Recording a step that cannot be recorded: it runs as it is, and why is told. Real graphs are tested in tests/gpu."""

from contextlib import contextmanager

import pytest
import torch

from engine.execute.cuda import graphs as cuda_graphs
from engine.execute.cuda.graphs import Graphs


class FakeGraph:
    """Counts its replays."""

    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was recorded; "failed" where a recording raised."""
    found: list[str] = []

    @contextmanager
    def record(graph: object, pool: object, capture_error_mode: str):
        try:
            yield
        except RuntimeError:
            found.append("failed")
            raise
        found.append("done")

    FakeGraph.replays = 0
    monkeypatch.setattr(cuda_graphs, "Graph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph", record)
    return found


def test_a_step_runs_once_then_is_recorded_then_replayed(recordings: list[str]) -> None:
    graphs, runs = Graphs(), []
    for _ in range(4):
        graphs.run("a", lambda: runs.append("a"))
    graphs.run("b", lambda: runs.append("b"))
    assert runs == ["a", "a", "b"]  # the second time into the recording
    assert recordings == ["done"]
    assert FakeGraph.replays == 3
    assert graphs.firsts == 3  # twice a, once b
    assert graphs.problem is None


def test_where_recording_fails_every_step_runs_as_it_is(recordings: list[str]) -> None:
    graphs, done = Graphs(), []
    recording = [False]

    def step() -> None:
        # A real step that is being recorded raises before it has done anything.
        if len(done) == 1 and not recording[0]:
            recording[0] = True
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        done.append(None)

    for _ in range(3):
        graphs.run("a", step)
    graphs.run("b", step)
    graphs.run("b", step)
    assert len(done) == 5
    assert recordings == ["failed"]
    assert graphs.firsts == 3  # a, a that was to be recorded, b: from then on nothing gets faster
    assert graphs.problem == "operation not permitted when stream is capturing"


def test_what_there_is_no_memory_to_record_runs_as_it_is_and_the_rest_is_recorded(
    recordings: list[str],
) -> None:
    graphs, runs = Graphs(), []

    def large() -> None:
        if len(runs) == 1:
            runs.append("no")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        runs.append("large")

    for _ in range(4):
        graphs.run("large", large)
    for _ in range(3):
        graphs.run("small", lambda: runs.append("small"))
    assert runs == ["large", "no", "large", "large", "large", "small", "small"]
    assert recordings == ["failed", "done"]
    assert graphs.firsts == 4
    assert graphs.problem is None
