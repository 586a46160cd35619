"""Idle work gives way within one chunk: counted in steps, with the loop held where the test wants it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.cache.rows import Rows
from engine.schedule.cpu_load import OtherPrograms
from engine.schedule.idle_pace import IdlePace
from engine.schedule.sequence import Priority, Sequence
from tests.counting import PATIENCE
from tests.engine.inside import evict_all
from tests.engine.test_chat import CONFIG, ask
from tests.engine.tiny import TinyEngine, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
LONG, MESSAGE = (
    torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (700, 60)
)


class Steps:
    """How many rows each forward computed. One of them is held until it is let go."""

    def __init__(self, engine: TinyEngine, hold: int) -> None:
        self.rows: list[int] = []
        self.reached, self.go = threading.Event(), threading.Event()
        forward = engine.scripted.forward

        def counted(token_ids: Any, *rest: Any) -> Any:
            self.rows.append(token_ids.numel())
            if len(self.rows) == hold:
                self.reached.set()
                assert self.go.wait(PATIENCE)
            return forward(token_ids, *rest)

        engine.scripted.forward = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("hold", [1, 2, 5])
def test_a_person_waits_for_the_chunk_that_runs_and_for_nothing_else(engine: TinyEngine, hold: int) -> None:
    engine.pieces.scheduler.max_chunk = 100
    steps = Steps(engine, hold)
    idle = Sequence(Rows.of(LONG), Priority.IDLE)
    engine.submit(idle)
    assert steps.reached.wait(PATIENCE)
    person = engine.start(Rows.of(MESSAGE), GREEDY)
    before = idle.computed
    steps.go.set()
    assert len(list(engine.events(person))) == 3
    assert steps.rows[hold : hold + 3] == [len(MESSAGE), 1, 1], "what came after the chunk was the person's"
    idle.finished.wait()
    chunk = steps.rows[hold - 1]
    assert chunk <= engine.pieces.scheduler.max_chunk
    assert sum(steps.rows[hold + 3 :]) == len(LONG) - before - chunk, "it went on where it was"


def test_an_answer_that_runs_is_never_held_up_by_idle_work(engine: TinyEngine) -> None:
    steps = Steps(engine, 2)
    person = engine.start(Rows.of(MESSAGE), GREEDY)
    assert steps.reached.wait(PATIENCE)
    idle = Sequence(Rows.of(LONG), Priority.IDLE)
    engine.submit(idle)
    steps.go.set()
    list(engine.events(person))
    idle.finished.wait()
    assert steps.rows[:3] == [len(MESSAGE), 1, 1]
    assert sum(steps.rows[3:]) == len(LONG)


def test_a_message_ends_the_settling_of_its_chat_and_uses_what_that_did(folder: Path) -> None:
    with tiny_engine(folder, CONFIG, max_chunk=16) as engine:
        chat = engine.chat()
        for i in range(4):
            ask(engine, chat, f"question {i}", "thoughts", f"a long answer with the number {i}")
        engine.evict_all()
        steps = Steps(engine, 3)
        chat.settle()
        assert steps.reached.wait(PATIENCE)
        settled, computed = sum(steps.rows), engine.scripted.rows_computed
        start = engine.start

        def start_and_let_go(*arguments: Any) -> Sequence:
            sequence = start(*arguments)
            steps.go.set()
            return sequence

        engine.start = start_and_let_go  # type: ignore[method-assign]
        ask(engine, chat, "next", None, "fine")
        assert chat.last is not None
        stats = chat.last.stats
        assert stats.cached_tokens == settled, "the chunk that ran was not in vain"
        assert sum(steps.rows) == settled + stats.prefilled_tokens + len(chat.last.token_ids) - 1
        assert engine.scripted.rows_computed - computed == sum(steps.rows[2:])


def test_idle_work_that_keeps_to_one_core_has_a_pace_of_its_own(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_step = engine.engine_step
    evict_all(engine)
    steps = Steps(engine, 0)
    busy = [True, True, False, False, True]
    monkeypatch.setattr(OtherPrograms, "are_busy", lambda self: busy[min(len(steps.rows), 4)])
    # What a chunk took does not matter here, only whose pace it was.
    monkeypatch.setattr(IdlePace, "saw", lambda self, rows, *_: setattr(self, "rows", rows + 1))
    engine_step.computing.pace.rows, engine_step.computing.pace_alone.rows = 40, 5
    idle = Sequence(Rows.of(LONG), Priority.IDLE)
    engine.submit(idle)
    idle.finished.wait()
    assert steps.rows[:7] == [5, 6, 40, 41, 7, 8, 9]
