"""The worker between the screen and a backend."""

import threading
from collections.abc import Callable

import pytest

from chatterm.backends.backend import Backend, DraftCost, EngineError, Exchange, FinishReason, Progress
from chatterm.backends.worker import (
    AnswerBegan,
    Answered,
    Job,
    JobDone,
    JobFailed,
    Loaded,
    LoadProgress,
    Report,
    Token,
    Worker,
)
from tests import counting
from tests.chatterm.scripted import Script, ScriptedBackend


def until(worker: Worker, condition: Callable[[list[Report]], object]) -> list[Report]:
    """Everything reported until `condition` holds."""
    reports: list[Report] = []

    def is_there() -> bool:
        reports.extend(worker.take())
        return bool(condition(reports))

    counting.until(is_there)
    return reports


def ended(reports: list[Report]) -> bool:
    return any(isinstance(report, JobDone | JobFailed) for report in reports)


def test_jobs_run_in_order_and_are_reported() -> None:
    backend = ScriptedBackend([Script("abcdefgh")])
    worker = Worker(backend)
    worker.start()
    worker.submit(Backend.open)
    assert [type(report) for report in until(worker, ended)] == [Loaded, JobDone]
    worker.submit(Backend.send, "hi")
    reports = until(worker, ended)
    assert [report.event.text for report in reports if isinstance(report, Token)] == ["abcd", "efgh"]
    answered = next(report for report in reports if isinstance(report, Answered))
    assert answered.outcome is not None
    assert answered.outcome.text == "abcdefgh"
    worker.submit(Backend.models)
    assert until(worker, ended) == [JobDone(Job("models"), ["scripted", "other"])]
    assert worker.close()
    assert backend.closed


@pytest.mark.parametrize("error", [EngineError("Known."), ValueError("sur\nprise"), MemoryError()])
def test_an_error_is_one_line_and_the_next_job_runs(error: Exception) -> None:
    worker = Worker(ScriptedBackend([Script(error=error), Script("fine")]))
    worker.start()
    worker.submit(Backend.send, "a")
    failed = until(worker, ended)[-1]
    assert isinstance(failed, JobFailed)
    assert "\n" not in failed.message
    assert "Traceback" not in failed.message
    worker.submit(Backend.send, "b")
    assert isinstance(until(worker, ended)[-1], JobDone)
    assert worker.close()


def test_only_the_latest_progress_is_kept() -> None:
    gate = threading.Event()
    steps = tuple(Progress("load", "weights", done, 100) for done in range(101))
    worker = Worker(ScriptedBackend(load_gate=gate, load_progress=steps))
    worker.start()
    worker.submit(Backend.open)
    reports = until(worker, lambda r: r and r[-1] == LoadProgress(steps[-1]))
    assert len(reports) <= len(steps)
    gate.set()
    until(worker, ended)
    assert worker.close()


def test_close_leaves_a_load_and_an_answer() -> None:
    gate = threading.Event()
    loading = ScriptedBackend(load_gate=gate, load_progress=(Progress("load", "weights", 1, 2),))
    worker = Worker(loading)
    worker.start()
    worker.submit(Backend.open)
    until(worker, bool)
    assert worker.close()
    assert loading.info is None

    answering = ScriptedBackend([Script("x" * 4000, tokens_per_s=100)])
    worker = Worker(answering)
    worker.start()
    worker.submit(Backend.send, "go")
    until(worker, bool)
    assert worker.close()
    assert answering.closed


def test_a_backend_that_cannot_be_interrupted_is_told() -> None:
    gate = threading.Event()
    worker = Worker(ScriptedBackend(load_gate=gate))  # it reports no progress: nothing can end it
    worker.start()
    worker.submit(Backend.open)
    until(worker, lambda _: worker._is_loading)
    assert not worker.close(), "it returns while the load waits"
    gate.set()


def test_a_stop_asked_before_the_backend_began_is_repeated() -> None:
    class Late(ScriptedBackend):
        """Forgets what was asked before it begins, as an engine does that has nothing to stop yet."""

        def stop(self, but: int | None = None) -> None:
            if self.calls:
                super().stop()

    backend = Late([Script("word " * 100, tokens_per_s=500)])
    worker = Worker(backend)
    worker.submit(Backend.send, "go")
    worker.stop()
    worker.start()
    reports = until(worker, ended)
    answered = next(report for report in reports if isinstance(report, Answered))
    assert answered.outcome is not None
    assert answered.outcome.finish_reason is FinishReason.CANCELLED
    assert worker.close()


def test_the_calls_of_a_session_reach_the_backend_and_report_their_value() -> None:
    backend = ScriptedBackend([Script("one", finish_reason=FinishReason.LENGTH), Script(" two")])
    worker = Worker(backend)
    worker.start()
    path = (Exchange(4, None, "hi", "yo", finish_reason="eos"), Exchange(7, 4, "again", "once more"))
    submits: list[Callable[[], None]] = [
        lambda: worker.submit(Backend.open),
        lambda: worker.submit(Backend.load_path, path),
        lambda: worker.submit(Backend.configure, {"think_cache": "mask"}),
        lambda: worker.submit(Backend.configure, {"sampling": {"top_k": 3}}),
        lambda: worker.submit(Backend.send, "go"),
        lambda: worker.submit(Backend.resume),
    ]
    for submit in submits:
        submit()
        assert isinstance(until(worker, ended)[-1], JobDone)
    assert backend.calls[1] == ("load_path", (4, 7))
    assert backend.history == [("hi", "yo"), ("again", "once more"), ("go", "one two")]
    assert (backend.think_cache, backend.sampling) == ("mask", {"top_k": 3})
    worker.submit(Backend.resume)
    assert until(worker, ended) == [
        JobFailed(Job("resume"), "The answer is complete; /retry generates another one.")
    ]
    worker.submit(Backend.count, "three more words")
    cost = DraftCost(tokens=3, new=8, free=4096 - 8 - 8)
    assert until(worker, ended) == [JobDone(Job("count", ("three more words",)), cost)]
    worker.submit(Backend.catalogue)
    assert until(worker, ended) == [JobDone(Job("catalogue"), backend.choices)]
    assert worker.close()


def test_drafts_that_are_gone_are_not_looked_at() -> None:
    gate = threading.Event()
    backend = ScriptedBackend([Script("x", gate=gate)])
    worker = Worker(backend)
    worker.start()
    worker.submit(Backend.send, "go")
    for draft in ("a", "a b", "a b c"):
        worker.submit(Backend.prepare, draft)
        worker.submit(Backend.count, draft)
    gate.set()
    until(worker, lambda reports: sum(isinstance(report, JobDone) for report in reports) == 7)
    drafts = [call for call in backend.calls if call[0] in ("prepare", "count")]
    assert drafts == [("prepare", "a b c"), ("count", "a b c")]
    assert worker.close()


def test_answer_now_ends_the_thinking_of_the_running_answer() -> None:
    backend = ScriptedBackend([Script("done", reasoning="hmmm" * 3, gate=threading.Event(), gate_after=1)])
    worker = Worker(backend)
    worker.start()
    worker.submit(Backend.send, "go")
    until(worker, bool)
    worker.answer_now()
    answered = next(report for report in until(worker, ended) if isinstance(report, Answered))
    assert answered.outcome is not None
    assert (answered.outcome.reasoning, answered.outcome.text) == ("hmmm", "done")
    assert worker.close()


def test_candidates_are_told_apart_and_an_error_of_one_comes_last() -> None:
    backend = ScriptedBackend(
        [Script("abcdefgh"), Script("never", error=EngineError("no room")), Script("ij")]
    )
    worker = Worker(backend)
    worker.start()
    worker.submit(Backend.candidates, "go", 3)
    reports = until(worker, ended)
    for index, text in ((0, "abcdefgh"), (2, "ij")):
        own = [
            report
            for report in reports
            if isinstance(report, AnswerBegan | Token | Answered) and report.index == index
        ]
        assert isinstance(own[0], AnswerBegan)
        assert "".join(token.event.text for token in own if isinstance(token, Token)) == text
        assert isinstance(own[-1], Answered)
        assert own[-1].outcome is not None
    assert [report for report in reports if isinstance(report, Answered) and report.index == 1] == [
        Answered(None, 1, "no room")
    ]
    assert isinstance(reports[-1], JobFailed)
    assert reports[-1].message == "no room"
    assert worker.close()
