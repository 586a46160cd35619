"""The local engine as a backend, with the real default model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.backend import Backend, ChatOptions, EngineError, FinishReason, ModelError, Progress
from chatterm.local import LocalBackend

SHORT = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Iterator[tuple[LocalBackend, list[Progress]]]:
    reports: list[Progress] = []
    backend = LocalBackend(str(smollm2), ChatOptions(context=1024, system="Be terse.", sampling=SHORT))
    backend.open(reports.append)
    yield backend, reports
    backend.close()


@pytest.fixture
def backend(loaded: tuple[LocalBackend, list[Progress]]) -> LocalBackend:
    loaded[0].reset()
    return loaded[0]


def test_it_is_a_backend_and_costs_nothing_before_it_is_opened() -> None:
    backend: Backend = LocalBackend("no such model", ChatOptions())
    assert (backend.info, backend.last, backend.figures(), backend.used_tokens) == (None, None, None, 0)
    backend.stop()
    backend.reset()
    backend.settle()
    backend.prepare("draft")
    backend.set_system("x")
    backend.set_think("off")
    assert (backend.system, backend.think) == ("x", "off")
    for call in (lambda: next(backend.send("hi")), lambda: next(backend.retry()), backend.undo):
        with pytest.raises(EngineError, match="No model is loaded"):
            call()
    backend.close()
    backend.close()


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(ModelError):
        LocalBackend("./no/such/folder", ChatOptions()).open()


def test_loading_tells_how_far_it_is(loaded: tuple[LocalBackend, list[Progress]]) -> None:
    backend, reports = loaded
    assert reports
    assert all(report.total is None or report.done <= report.total for report in reports)
    assert backend.info is not None
    assert backend.info.context_length == 1024
    assert "torch" not in backend.info.dtype
    figures = backend.figures()
    assert figures is not None
    assert figures.weight_bytes > 0


def test_a_turn_retry_undo_and_their_count(backend: LocalBackend) -> None:
    empty = backend.used_tokens
    events = list(backend.send("Name a colour."))
    last = backend.last
    assert last is not None
    assert last.text.startswith("".join(event.text for event in events))
    assert last.finish_reason in (FinishReason.LENGTH, FinishReason.EOS)
    assert last.stats.generated_tokens == len(last.stats.to_dict()) or last.stats.generated_tokens >= len(
        events
    )
    used = backend.used_tokens
    assert used > empty
    list(backend.retry())
    assert backend.last is not None
    assert backend.last.text == last.text  # greedy
    assert backend.used_tokens == used
    assert backend.undo()
    assert not backend.undo()
    assert backend.used_tokens == empty


def test_a_stopped_answer_is_kept(backend: LocalBackend) -> None:
    events = backend.send("Count to one hundred.")
    next(events)
    backend.stop()
    assert len(list(events)) < 8
    assert backend.last is not None
    assert backend.last.finish_reason is FinishReason.CANCELLED
    assert backend.used_tokens > 0


def test_a_message_that_does_not_fit_changes_nothing(backend: LocalBackend) -> None:
    list(backend.send("Hi."))
    used = backend.used_tokens
    with pytest.raises(EngineError, match="does not fit"):
        next(backend.send("word " * 2000))
    assert backend.used_tokens == used


def test_a_switch_that_fails_early_keeps_the_model(backend: LocalBackend, tmp_path: Path) -> None:
    list(backend.send("Hi."))
    with pytest.raises(ModelError):
        backend.switch(str(tmp_path))
    assert backend.info is not None
    assert list(backend.send("Still there?"))
