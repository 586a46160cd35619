"""The KV cache on disk: the same text after a restart, whatever became of the files."""

import json
import os
from pathlib import Path
from threading import Event
from time import time
from typing import Any

import pytest

from chatterm.conversation.figures import SessionStats
from chatterm.conversation.stats import stats_lines
from engine import engine as engines
from engine.cache.host_memory import PromptCosts
from engine.cache.rows import Rows
from engine.conversation.history import ThinkCache
from engine.params import LoadOptions, SamplingParams
from engine.schedule.sequence import Priority, Sequence
from engine.store import cost_cache, disk, identity
from engine.store.folder import Folder
from tests.counting import PATIENCE, until
from tests.covering import each_value_once
from tests.engine.keeping import GREEDY, answer, heard, on_disk, pause_disk, saved, until_written
from tests.engine.tiny import say, tiny_engine
from tests.models.checkpoints import files_of
from tests.models.families import MistralConfig, tiny

PROMPT = [(17 * i) % 250 for i in range(120)]


def test_after_a_restart_only_what_is_new_is_computed(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        first, computed = answer(engine, PROMPT)
        assert computed == len(PROMPT)
        told = PROMPT + [token for token, _ in first]
        engine.warm(told)  # the last token of an answer has no row before
        saved(engine, "one", told)
        expected, _ = answer(engine, [*told, 5, 6, 7])
    with on_disk(tmp_path, store) as engine:
        again, computed = answer(engine, [*told, 5, 6, 7])
        figures = engine.figures().disk
    whole = len(told) // 4 * 4
    assert again == expected
    assert computed == len(told) + 3 - whole
    assert figures.restored_tokens == whole
    assert figures.problem == ""


@each_value_once
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("policy", ["exact", "mask"])
@pytest.mark.parametrize("more", range(4))
def test_a_resumed_chat_is_brought_back_while_it_is_read_or_asked(
    tmp_path: Path, policy: ThinkCache, reads: bool, more: int
) -> None:
    store = tmp_path / "kv"
    params = SamplingParams(temperature=0.0, max_tokens=70)
    with on_disk(tmp_path, store) as engine:
        chat = engine.chat("Be brief.", think_cache=policy)
        chat.owner = "chat"
        for number in range(3):
            engine.scripted.script = say(
                engine, "some thoughts " * 2, f"the answer number {number}" + "." * more
            )
            list(chat.send(f"question {number}", params))
        turns = chat.turns
        chat.settle(wait=True)
        until_written(engine)
        expected = list(chat.send("why?", GREEDY))
    with on_disk(tmp_path, store) as engine:
        chat = engine.chat("Be brief.", think_cache=policy)
        chat.load(turns)
        engine.scripted.rows_computed = 0
        if reads:
            chat.settle(wait=True)
            assert engine.scripted.rows_computed < 4 + len("<|im_end|>\n"), "nothing but a rest is computed"
        assert list(chat.send("why?", GREEDY)) == expected
        assert chat.last is not None
        rows, new = (
            chat.last.stats.prompt_tokens,
            len("\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"),
        )
        assert engine.scripted.rows_computed < 4 + new + len(expected) < rows
        engine.check()


def test_who_reads_or_asks_for_much_before_the_disk_was_looked_at_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(disk.WORTH_WAITING, "cpu", 100)
    store, late = tmp_path / "kv", Event()
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
    with on_disk(tmp_path, store, late=late) as engine:
        _, computed = answer(engine, PROMPT[:99])
        assert computed == 99, "who asks for little does not wait"
        idle = Sequence(Rows.of(PROMPT[:8]), Priority.IDLE)
        engine.submit(idle)
        asked = engine.start(Rows.of(PROMPT), GREEDY)
        assert not engine.loop.call(lambda: engine.pieces.scheduler.has_work), "they wait"
        late.set()
        assert idle.finished.wait(PATIENCE)
        assert heard(engine, asked) == expected
        assert asked.stats().prefilled_tokens == 1, "the row whose logits are needed"
    with on_disk(tmp_path, store, late=(never := Event())) as engine:
        asked = engine.start(Rows.of(PROMPT), GREEDY)
        engine.loop.close()
        never.set()
        assert asked.finished.wait(PATIENCE), "nobody is left waiting"
    with on_disk(tmp_path, store, late=(never := Event()), patience=0.05) as engine:
        assert answer(engine, PROMPT) == (expected, len(PROMPT)), "a disk that hangs is not waited for"
        never.set()


def kept_costs(store: Path) -> PromptCosts:
    """What is known of the only model in `store`, if anything is."""
    return cost_cache.load_costs(next(store.rglob("costs.json"), store))


@pytest.mark.parametrize("wins", [True, False])
def test_the_first_prompt_after_a_start_knows_what_was_measured(tmp_path: Path, wins: bool) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
        engine.loop.call(lambda: engine.disk.costs.saw(500, 0.1 if wins else 0.001))
        until(lambda: list(store.rglob("costs.json")))
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT)[1] == 1, "reading was never measured"
        engine.loop.call(lambda: setattr(engine.disk.costs, "brought", 0.0001))
        until(lambda: kept_costs(store).brought == 0.0001)
    with on_disk(tmp_path, store) as engine:
        figures = engine.figures().disk
        assert (figures.brought_s, figures.computed_s) == (0.0001, 0.0002 if wins else 0.000002)
        assert figures.is_used == wins
        assert answer(engine, PROMPT)[1] == (1 if wins else len(PROMPT))
    with on_disk(tmp_path, store, "other weights") as engine:
        assert engine.figures().disk.brought_s is engine.figures().disk.computed_s is None


@pytest.mark.parametrize("wins", [True, False])
@pytest.mark.parametrize("cold", [True, False])
def test_what_the_disk_itself_has_to_give_is_judged_by_what_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool, wins: bool
) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
        costs = PromptCosts(0.0001, 0.0002, 0.00001 if wins else 0.1)
        engine.loop.call(lambda: setattr(engine.disk, "costs", costs))
        until(lambda: kept_costs(store) == costs)
    monkeypatch.setattr(Folder, "is_cold", lambda *given: cold)
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT) == (expected, 1 if wins or not cold else len(PROMPT))
        assert engine.figures().disk.is_used
        learnt = engine.disk.costs
        assert (learnt.brought != costs.brought, learnt.cold != costs.cold) == (not cold, cold and wins)
        engine.check()


KNOWN = {"brought_s": 0.25, "computed_s": 0.5}
WRONG = (-1.0, 1e300, float("nan"), float("inf"), "0.1", True, [], 7)


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in ("brought_s", "computed_s", "cold_s", "at") for value in WRONG),
        *(("cut", cut) for cut in (0, 1, 20, 60)),
        *(("more", text) for text in ("}", "[" * 4000, "\0" * 10_000)),
        ("old", 8 * 86400.0),
        ("old", -86400.0),
        ("list", ""),
    ],
    ids=str,
)
def test_of_a_damaged_file_of_measurements_nothing_is_known(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "costs.json"
    known = KNOWN | {"at": time()}
    path.write_text(json.dumps(known))
    assert cost_cache.load_costs(path) == PromptCosts(0.25, 0.5)
    path.write_text(json.dumps(known | {"brought_s": None}))
    assert cost_cache.load_costs(path) == PromptCosts(None, 0.5)
    path.write_text(json.dumps(known | {"cold_s": 0.75}))
    assert cost_cache.load_costs(path) == PromptCosts(0.25, 0.5, 0.75)
    match wrong:
        case dict():
            path.write_text(json.dumps(known | wrong))
        case "cut", at:
            path.write_text(json.dumps(known)[:at])
        case "more", text:
            path.write_text(text + json.dumps(known) + text)
        case "old", seconds:
            path.write_text(json.dumps(known | {"at": time() - seconds}))
        case _:
            path.write_text(json.dumps([known]))
    assert cost_cache.load_costs(path) == cost_cache.load_costs(tmp_path) == PromptCosts(), "nor of a folder"


@pytest.mark.parametrize("fingerprint", ["other weights", "other kernels"])
def test_what_something_else_computed_is_not_found(tmp_path: Path, fingerprint: str) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
    with on_disk(tmp_path, store, fingerprint) as engine:
        assert answer(engine, PROMPT)[1] == len(PROMPT)


def test_what_the_bits_of_a_block_depend_on_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(engines, "DiskTier", lambda *given: told.append(given[-1]()))
    with tiny_engine(tmp_path) as engine:
        files = files_of(tmp_path)
        engine._keep_in(tmp_path, files, LoadOptions())
        engine._keep_in(tmp_path, files, LoadOptions(deterministic=True))
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        engine._keep_in(tmp_path, files, LoadOptions())
        engine.disk = engine.engine_step.disk = None
    usual, deterministic, changed = told
    assert {name for name in usual if usual[name] != deterministic[name]} == {"kernels"}
    assert {name for name in usual if usual[name] != changed[name]} == {"files"}


@pytest.mark.parametrize("name", identity._CODE)
def test_all_code_that_computes_names_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here = Path(identity.__file__).parents[2]
    for one in identity._CODE:
        copy = tmp_path / one
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(here / one)
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "engine" / "store" / "identity.py"))
    before = identity.of_code.__wrapped__()
    found = tmp_path / name
    found.unlink()
    if found.suffix:
        found.write_text("changed")
    else:
        found.mkdir()
        (found / "some.py").write_text("changed")
    assert identity.of_code.__wrapped__() != before


def test_no_idle_work_is_done_while_somebody_waits_for_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
    with on_disk(tmp_path, store) as engine:
        done = Event()
        monkeypatch.setattr(engine.engine_step.computing.runner, "while_idle", lambda: done.set())
        go = pause_disk(engine)
        sequence = engine.start(Rows.of(PROMPT), GREEDY)
        engine.loop.call(lambda: None)  # it waits for the disk now
        done.clear()
        for _ in range(10):
            assert engine.loop.call(lambda: engine.engine_step.is_busy)
        assert not done.is_set()
        go()
        heard(engine, sequence)
        assert done.wait(PATIENCE), "it goes on afterwards"
        assert not engine.loop.call(lambda: engine.engine_step.is_busy)


def test_who_is_cancelled_while_blocks_come_is_ended_and_the_loop_too(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
    with on_disk(tmp_path, store) as engine:
        go = pause_disk(engine)
        sequence = engine.start(Rows.of(PROMPT), GREEDY)
        sequence.cancelled = True
        go()
        assert list(engine.events(sequence)) == []
    with on_disk(tmp_path, store) as engine:
        engine.disk._tasks.put(lambda: until(lambda: engine.disk._finished))
        sequence = engine.start(Rows.of(PROMPT), GREEDY)
        engine.close()
        assert sequence.finished.wait(PATIENCE), "nobody is left waiting"


def test_why_there_is_no_tier_is_said(tmp_path: Path) -> None:
    config = tiny(MistralConfig, sliding_window=24, head_dim=32, vocab_size=272, max_position_embeddings=512)
    with tiny_engine(tmp_path, config) as engine:
        assert engine.figures().disk is None
        engine._keep_in(tmp_path / "kv", files_of(tmp_path), LoadOptions())
        disk = engine.figures().disk
        assert disk is not None
        assert "sees only a window" in disk.problem
        shown = " ".join(
            text
            for line in stats_lines(200, None, SessionStats(), None, engine.figures())
            for text, *_ in line
        )
        assert disk.problem in shown
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("policy", ["exact", "mask"])
@pytest.mark.parametrize("then", ["typed", "another", "asked"])
def test_what_takes_the_place_of_reading_while_blocks_come(
    tmp_path: Path, policy: ThinkCache, then: str
) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        chat = engine.chat(think_cache=policy)
        chat.owner = "chat"
        engine.scripted.script = say(engine, "some thoughts", "an answer of some length")
        list(chat.send("a question", SamplingParams(temperature=0.0, max_tokens=70)))
        turns = chat.turns
        chat.settle(wait=True)
        until_written(engine)
        expected = list(chat.send("why?", GREEDY))
    with on_disk(tmp_path, store) as engine:
        go = pause_disk(engine)
        chat = engine.chat(think_cache=policy)
        chat.load(turns)
        chat.settle()
        if then == "typed":
            chat.prepare("wh")
        elif then == "another":
            chat.load([])
            chat.prepare("else")
            chat.load(turns)
        answer = chat.send("why?", GREEDY)
        go()
        assert list(answer) == expected


def test_a_chunk_says_what_it_takes_on_disk(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        engine.chunks.keep(PROMPT, "paper", wait=True, owner="chunk-paper")
        until_written(engine)
        engine.chunks.keep(PROMPT[:5], "nowhere", wait=True)
        on_disk_now = [chunk.disk_bytes for chunk in engine.chunks.list()]
    assert on_disk_now == [next(store.rglob("chunk-paper.kv")).stat().st_size, 0]
    assert on_disk_now[0] > len(PROMPT) * 100
