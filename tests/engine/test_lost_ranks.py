"""A rank that is killed or stopped at a random moment: one line soon, no process left, and nothing else that is left.

CHATTERM_LOST_RANKS is how often. What is said of time is printed: pytest -s.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from time import monotonic, sleep

import pytest

from engine.engine import Engine
from engine.errors import EngineError
from engine.parallel import ranks
from engine.params import SamplingParams
from tests.counting import PATIENCE, until
from tests.engine.divided import PROMPT, is_running, load, text, write_model

TRIALS = int(os.environ.get("CHATTERM_LOST_RANKS", "3"))
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
WHEN = [("decode", KILL), ("idle", STOP), ("load", KILL), ("prefill", KILL)]
WHEN += [("decode", STOP), ("load", STOP), ("prefill", STOP), ("idle", KILL)]
COUNT = 3
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of the ranks that are started from now on."""
    pids: list[int] = []
    start = ranks._start

    def noted(*given: object) -> object:
        rank = start(*given)  # type: ignore[arg-type]
        pids.append(rank.process.pid)
        return rank

    monkeypatch.setattr(ranks, "_start", noted)
    return pids


def ask_for_ever(engine: Engine, ask: Callable[[Engine], object]) -> None:
    while True:
        ask(engine)


def prompts(random: Random) -> Callable[[Engine], object]:
    return lambda engine: engine.warm([random.randrange(256) for _ in range(390)])


def answers(random: Random) -> Callable[[Engine], object]:
    params = SamplingParams(temperature=1.0, max_tokens=300)
    return lambda engine: text(engine, [random.randrange(256), *PROMPT], params)


def hear(loading: "Future[Engine]", asked: "Future[None] | None") -> None:
    """Raises what is told of a lost rank, to whoever asks or loads, or to who asks next."""
    if asked is not None:
        asked.result()
    engine = loading.result()  # it may have come before a rank was lost
    until(lambda: engine.is_closed)
    text(engine, PROMPT)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_lost_rank_is_one_line_soon(
    folder: Path, started: list[int], trial: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (when, how), random = WHEN[trial % len(WHEN)], Random(trial)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        loading, asked = pool.submit(load, folder, COUNT), None
        if when == "load":
            until(lambda: len(started) == COUNT - 1)
            sleep(random.uniform(0.0, 3.0))
        else:
            engine = loading.result()
            if when != "idle":
                work = prompts if when == "prefill" else answers
                asked = pool.submit(ask_for_ever, engine, work(random))
            sleep(random.uniform(0.0, 1.0))
        try:
            os.kill(random.choice(started), how)
            began = monotonic()
            with pytest.raises(EngineError, match="Load the model again") as failure:
                hear(loading, asked)
            took = monotonic() - began
            print(f"{trial}: {when}, {how.name}: {took:.1f} s: {failure.value}")
            assert "\n" not in str(failure.value)
            assert took < 20, "ten seconds, and what a busy machine adds"
            until(lambda: not any(map(is_running, started)))
            if loading.exception() is None:
                assert loading.result().is_closed, "a server loads it anew"
        finally:
            if loading.exception() is None:
                loading.result().close()
    assert not list(tmp_path.glob("chatterm-ranks-*"))


def test_a_rank_that_ends_before_it_meets_the_others_is_what_is_told(
    folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_lost, lose = Event(), ranks.Ranks._lose

    def noted(self: ranks.Ranks, error: EngineError) -> EngineError:
        first = lose(self, error)
        is_lost.set()
        return first

    def in_vain(*_: object) -> None:
        os.kill(started[0], KILL)
        assert is_lost.wait(PATIENCE)
        raise EngineError("The processes of the model could not connect to each other.")

    monkeypatch.setattr(ranks.Ranks, "_lose", noted)
    monkeypatch.setattr(ranks.Group, "join", in_vain)
    with pytest.raises(EngineError, match=r"has ended \(signal 9\)"):
        load(folder, 2)


def test_a_step_that_fails_here_ends_the_others(folder: Path, started: list[int]) -> None:
    """They wait for the rest of it, and would take the sums of the next one for that."""
    engine = load(folder, 2)
    try:
        forward = engine.pieces.runner._model.forward

        def fails(*given: object) -> object:
            forward(*given)  # type: ignore[arg-type]
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        engine.pieces.runner._model.forward = fails  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="Out of memory"):
            text(engine, PROMPT)
        until(lambda: engine.is_closed)
        assert not any(map(is_running, started))
    finally:
        engine.close()


@pytest.mark.skipif(TRIALS < 20, reason="takes fifteen seconds")
def test_a_first_rank_that_was_stopped_goes_on(folder: Path) -> None:
    """As by Ctrl-Z: the others wait for it, however long, and it does not take that for theirs."""
    program = (
        "import sys; from pathlib import Path; from tests.engine.divided import *;"
        "engine = load(Path(sys.argv[1]), 2);"
        "[print(len(text(engine, PROMPT)), flush=True) for _ in range(100_000)]"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "24\n"
            first.send_signal(STOP)
            sleep(13.0)
            first.send_signal(signal.SIGCONT)
            for _ in range(5):
                assert first.stdout.readline() == "24\n"
        finally:
            first.kill()
