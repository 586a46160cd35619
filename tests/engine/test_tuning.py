"""The search for the fastest choices, by made-up steps; the file that keeps them; when tuning runs and stops."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.execute.tuning import store
from engine.execute.tuning.search import MARGIN, WORTH, Choice, Measure, Numbers, search
from engine.execute.tuning.store import Tuning, all_kept, keep, load_tuning
from tests.counting import PATIENCE
from tests.fresh import examples

IDENTITY = {"gpu": "NVIDIA H200", "driver": "580.65.06", "triton": "3.6.0", "kernels": "abc", "model": "def"}
TUNING = Tuning("Qwen3-0.6B", {"1 to 8 rows: 1024 x 3072": (2, 8, 1, 3)}, {"1": (5.6e-4, 5.4e-4)})
Costs = dict[str, list[float | None]]
"""Seconds that each candidate of a thing adds to a step; None: it does not work."""


def steps(costs: Costs, noise: float, seed: int = 0) -> Measure:
    """Steps that take the sum of what is chosen, and some noise."""
    dice = random.Random(seed)

    def measure(choices: Sequence[Choice], rounds: int) -> list[list[float]]:
        found = []
        for choice in choices:
            parts = [known[choice.get(name, (0,))[0]] for name, known in costs.items()]
            whole = None if None in parts else sum(part for part in parts if part is not None)
            times = [whole * (1 + dice.uniform(-noise, noise)) for _ in range(rounds)] if whole else []
            found.append(times)
        return found

    return measure


def candidates(costs: Costs) -> dict[str, tuple[Numbers, ...]]:
    return {name: tuple((number,) for number in range(len(known))) for name, known in costs.items()}


TIMES = st.lists(st.none() | st.floats(1.0, 2.0), min_size=0, max_size=5)
COSTS = st.dictionaries(
    st.text("abc", max_size=3), st.tuples(st.floats(1.0, 2.0), TIMES), min_size=1, max_size=5
)


@given(COSTS, st.integers(0, 99))
@examples(50)
def test_what_is_chosen_is_faster_and_what_is_much_faster_is_chosen(made: dict[str, Any], seed: int) -> None:
    costs: Costs = {name: [first, *rest] for name, (first, rest) in made.items()}
    found = search(candidates(costs), steps(costs, 0.001, seed))
    best: float = sum(min(time for time in known if time is not None) for known in costs.values())
    firsts = sum(known[0] or 0.0 for known in costs.values())
    truly = 0.0
    for name, known in costs.items():
        time = known[found.chosen[name][0]] if name in found.chosen else known[0]
        assert time is not None, "what does not work is never chosen"
        truly += time
    assert truly <= firsts
    # What is left was not worth its name: of each thing no more than the margin, and the noise of a decision.
    assert truly <= best + ((len(costs) + 1) * (MARGIN + 0.003) + WORTH) * firsts
    assert found.after <= found.before
    assert bool(found.chosen) == (found.after < found.before)


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(2, 9))
@examples(25)
def test_noise_chooses_nothing(seed: int, things: int, count: int) -> None:
    costs: Costs = {str(thing): [1.0] * count for thing in range(things)}
    assert search(candidates(costs), steps(costs, 0.004, seed)).chosen == {}


def test_a_gain_too_small_to_be_seen_in_use_changes_nothing() -> None:
    for gain, is_kept in ((WORTH - 0.005, False), (WORTH + 0.005, True)):
        costs: Costs = {"a": [1.0, 1.0 - gain]}
        assert bool(search(candidates(costs), steps(costs, 0.0)).chosen) is is_kept


def test_what_slows_two_or_eight_rows_down_is_given_up_and_the_rest_stays() -> None:
    alone: Costs = {"a": [1.0, 0.9], "b": [1.0, 0.8], "c": [1.0, 0.95], "d": [1.0, 0.9]}
    two: Costs = {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 1.0], "d": [1.0, 1.3]}
    eight: Costs = {"a": [1.0, 1.0], "b": [1.0, 1.4], "c": [1.0, 0.99], "d": [1.0, 0.9]}
    found = search(candidates(alone), steps(alone, 0.0), guards=[steps(two, 0.0), steps(eight, 0.0)])
    assert found.chosen == {"a": (1,), "c": (1,)}
    assert found.after == pytest.approx(3.85)


def test_nothing_more_is_tried_once_time_is_up_and_what_was_found_counts() -> None:
    costs: Costs = {name: [1.0, 0.5] for name in "abcd"}
    left, told = iter([True, True, False, False]), list[str]()
    found = search(candidates(costs), steps(costs, 0.0), lambda: next(left), told=told.append)
    assert told == ["a", "b"]
    assert found.chosen == {"a": (1,), "b": (1,)}


def test_a_machine_on_which_nothing_works_chooses_nothing() -> None:
    costs: Costs = {"a": [None, None], "b": [None, None]}
    assert search(candidates(costs), steps(costs, 0.0)).chosen == {}


# --- the file ---


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuning"


def test_what_was_found_is_there_for_the_same_machine_and_model_and_for_no_other() -> None:
    assert load_tuning(IDENTITY) is None
    keep(IDENTITY, TUNING)
    assert load_tuning(IDENTITY) == TUNING
    for name in IDENTITY:
        assert load_tuning({**IDENTITY, name: "another"}) is None
    machine = {name: value for name, value in IDENTITY.items() if name != "model"}
    keep({**IDENTITY, "model": "other"}, Tuning("other", {}, {}))
    keep({**IDENTITY, "triton": "3.7.0"}, TUNING)
    assert sorted(tuning.model for tuning in all_kept(machine)) == ["Qwen3-0.6B", "other"]


def written(folder: Path) -> Path:
    keep(IDENTITY, TUNING)
    (path,) = folder.glob("*.json")
    return path


@given(st.data())
@examples(60)
def test_a_damaged_file_is_as_good_as_none_or_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATTERM_CACHE", str(tmp_path_factory.getbasetemp() / "damaged"))
        path = written(tmp_path_factory.getbasetemp() / "damaged" / "tuning")
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        found = load_tuning(IDENTITY)
        if found is not None:  # another number is no damage that a file could know of: the candidates decide
            assert all(type(one) is int for cut in found.chosen.values() for one in cut)
            assert all(len(pair) == 2 and min(pair) > 0 for pair in found.seconds.values())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"for": {**IDENTITY, "gpu": "NVIDIA H100"}},
        {"for": []},
        {"chosen": {"x": [1.5]}},
        {"chosen": {"x": [True]}},
        {"chosen": {"x": list(range(99))}},
        {"chosen": {"x": "1234"}},
        {"chosen": None},
        {"seconds": {"1": [1e-3]}},
        {"seconds": {"1": [1e-3, -1.0]}},
        {"seconds": {"1": [1e-3, float("nan")]}},
        {"more": "x" * store.LARGEST},
    ],
    ids=str,
)
def test_a_foreign_file_is_as_good_as_none(folder: Path, change: dict[str, Any]) -> None:
    path = written(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert load_tuning(IDENTITY) is None


def test_nesting_without_end_and_a_folder_in_its_place_are_no_errors(folder: Path) -> None:
    path = written(folder)
    path.write_text("[" * 100_000)
    assert load_tuning(IDENTITY) is None
    path.unlink()
    path.mkdir()
    assert load_tuning(IDENTITY) is None
    assert list(all_kept({})) == []


def test_what_a_killed_process_left_is_not_read_and_swept_away_later(folder: Path) -> None:
    path = written(folder)
    young, old = folder / f"{path.name}.1.tmp", folder / f"{path.name}.2.tmp"
    for half in (young, old):
        half.write_text(path.read_text()[:40])
    os.utime(old, (time.time() - 2 * store.OLD_S,) * 2)
    assert load_tuning(IDENTITY) == TUNING
    keep(IDENTITY, TUNING)
    assert young.exists()
    assert not old.exists()


WRITER = """
import sys
from engine.execute.tuning.store import Tuning, keep
for number in range(40):
    keep({identity!r}, Tuning(sys.argv[1] * 100, {{"x" * 50: (number,) * 8}}, {{}}))
"""


def test_two_processes_at_once_leave_what_one_of_them_wrote_and_nothing_between() -> None:
    keep(IDENTITY, TUNING)
    command = [sys.executable, "-c", WRITER.format(identity=IDENTITY)]
    writers = [subprocess.Popen([*command, name]) for name in "ab"]
    seen = []
    while any(writer.poll() is None for writer in writers):
        seen.append(load_tuning(IDENTITY))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert None not in seen
    last = load_tuning(IDENTITY)
    assert last is not None
    assert last.model in ("a" * 100, "b" * 100)
    assert last.chosen == {"x" * 50: (39,) * 8}


# --- when it runs ---


class FakeBench:
    """Steps of two things, of which the second choice of one is faster."""

    def __init__(self, compute: Callable[[Callable[[], Any]], Any]) -> None:
        self.compute, self.closed = compute, False
        self.costs: Costs = {"1 to 8 rows: a": [1.0, 0.5], "1 to 8 rows: b": [1.0, 1.0]}

    def candidates(self, rows: int) -> dict[str, tuple[Numbers, ...]]:
        return self.compute(lambda: candidates(self.costs) if rows == 1 else {})  # type: ignore[no-any-return]

    def compile(self, rows: int, choices: Sequence[Choice]) -> Callable[[], None]:
        return lambda: None

    def measure(self, rows: int) -> Measure:
        return lambda choices, rounds: self.compute(lambda: steps(self.costs, 0.0)(choices, rounds))  # type: ignore[no-any-return]

    def close(self) -> None:
        self.closed = True


class Fake:
    """An engine's thread, as a tuner sees it."""

    def __init__(self) -> None:
        pytest.importorskip("triton")
        from engine.execute.cuda import tuner

        self.module = tuner
        self.busy = False
        self.benches: list[FakeBench] = []
        self.tuner = tuner.Tuner(self.bench, IDENTITY, "tiny", lambda job: job(), lambda: self.busy, 10.0)

    def bench(self, compute: Callable[[Callable[[], Any]], Any]) -> FakeBench:
        self.benches.append(FakeBench(compute))
        return self.benches[-1]


def test_tuning_keeps_what_it_found_and_says_so() -> None:
    fake = Fake()
    found = fake.tuner.run()
    assert found.chosen == {"1 to 8 rows: a": (1,)}
    assert found.seconds == {"1": (2.0, 1.5)}
    assert load_tuning(IDENTITY) == found == fake.tuner.kept()
    assert fake.benches[0].closed
    line = "Tuned for this GPU: 1 better choice for its kernels; a token takes 25.0% less time from the next start on."
    assert fake.module.result_line(found) == line


def test_tuning_waits_while_somebody_asks_for_something(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr(fake.module, "IDLE_S", 0.0)
    monkeypatch.setattr(fake.module, "BUSY_S", 0.001)
    fake.busy = True
    looked = threading.Event()
    call = fake.tuner._call

    def look(job: Callable[[], Any]) -> Any:
        looked.set()
        return call(job)

    fake.tuner._call = look
    fake.tuner.start()
    assert looked.wait(PATIENCE)
    assert load_tuning(IDENTITY) is None
    fake.busy = False
    fake.tuner.join()
    assert load_tuning(IDENTITY) is not None
    assert fake.tuner.notes[0].startswith("Tuned for this GPU")


def test_while_it_tunes_it_says_how_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr(fake.module, "IDLE_S", 0.0)
    seen: list[tuple[str, ...]] = []

    def bench(compute: Callable[[Callable[[], Any]], Any]) -> FakeBench:
        seen.append(fake.tuner.notes)
        return FakeBench(compute)

    fake.tuner._make_bench = bench
    fake.tuner.start()
    fake.tuner.join()
    ((note,),) = seen
    assert note.endswith("which takes about 10 s; the next start uses the result.")


def test_tuning_that_is_stopped_lets_go_of_everything_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Fake()
    monkeypatch.setattr(fake.module, "IDLE_S", 0.0)
    monkeypatch.setattr(fake.module, "BUSY_S", 0.001)
    fake.busy = True
    fake.tuner.start()
    fake.tuner.stop()
    fake.tuner.join()
    assert all(bench.closed for bench in fake.benches)
    assert fake.tuner.notes == ()
    assert load_tuning(IDENTITY) is None


def test_stopping_does_not_wait_for_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr(fake.module, "IDLE_S", 0.0)
    monkeypatch.setattr(fake.module, "BUSY_S", 0.001)
    compiling, killed = threading.Event(), threading.Event()

    def seconds(choices: Sequence[Choice], rounds: int) -> list[list[float]]:
        compiling.set()
        assert killed.wait(PATIENCE), "nobody ended the processes"
        raise RuntimeError("the process that compiles ended")

    monkeypatch.setattr(FakeBench, "measure", lambda self, rows: seconds)
    monkeypatch.setattr(FakeBench, "close", lambda self: killed.set())
    fake.tuner.start()
    assert compiling.wait(PATIENCE)
    fake.tuner.stop()
    fake.tuner.join()
    assert fake.tuner.notes == ()
    assert load_tuning(IDENTITY) is None


def test_what_goes_wrong_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine.errors import EngineError

    fake = Fake()
    fake.tuner._call = lambda job: (_ for _ in ()).throw(RuntimeError("CUDA out of memory\nmore"))
    with pytest.raises(EngineError, match=r"^The kernels could not be tuned: CUDA out of memory\.$"):
        fake.tuner.run()
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngineError, match="The result of tuning could not be written"):
        Fake().tuner.run()
