"""What many conversations begin with: read once, by whoever gets there first, and kept on disk with what an engine that
ends still had to write."""

from pathlib import Path
from threading import Event

import pytest

from engine.cache.rows import Rows
from engine.params import SamplingParams
from engine.schedule.sequence import Priority, Sequence
from engine.store import disk
from engine.store.disk import DiskTier
from engine.store.folder import Folder, chunk_owner, forget
from tests.counting import PATIENCE, until
from tests.engine.keeping import GREEDY, answer, heard, on_disk, pause_disk, saved, until_written
from tests.engine.test_disk import PROMPT
from tests.engine.tiny import say, tiny_engine

PAPER = "a paper of some length, " * 12


def test_a_prompt_that_is_asked_while_its_beginning_is_brought_back_waits_for_that(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, [*PROMPT, 5, 6])
        saved(engine, chunk_owner("paper"), PROMPT)
    with on_disk(tmp_path, store) as engine:
        go = pause_disk(engine)
        engine.chunks.keep(PROMPT, "paper", owner=chunk_owner("paper"))
        engine.loop.call(lambda: None)
        assert [one.idle for one in engine.disk._restores] == [True]
        asked = engine.start(Rows.of([*PROMPT, 5, 6]), GREEDY)
        engine.loop.call(lambda: None)
        (coming,) = engine.disk._restores
        assert not coming.idle, "a person waits for it now"
        go()
        assert heard(engine, asked) == expected
        assert asked.stats().prefilled_tokens == 2
        assert engine.figures().disk.restored_tokens == len(PROMPT), "each block once"
        engine.check()


def test_who_does_not_want_it_any_more_does_not_end_it_for_others(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
    with on_disk(tmp_path, store) as engine:
        go = pause_disk(engine)
        reading = Sequence(Rows.of(PROMPT), Priority.IDLE)
        engine.submit(reading)
        asked = engine.start(Rows.of(PROMPT), GREEDY)
        reading.cancelled = True
        go()
        assert heard(engine, asked) == expected
        assert asked.stats().prefilled_tokens == 1
        assert reading.finished.wait(PATIENCE)


def test_what_a_person_computed_of_it_idle_work_does_not_compute_again(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        engine.loop.call(lambda: setattr(engine.pieces.scheduler, "idle_chunk", 8))
        engine.chunks.keep(PROMPT, "paper")
        until(lambda: engine.chunks.progress("paper") is None or engine.chunks.progress("paper")[0] >= 8)
        answer(engine, [*PROMPT, 1, 2, 3])
        idle = Sequence(Rows.of([*PROMPT, 7]), Priority.IDLE)
        engine.submit(idle)
        assert idle.finished.wait(PATIENCE)
        until(lambda: engine.chunks.progress("paper") is None)
        rows = len(PROMPT) + 3 + (GREEDY.max_tokens - 1) + 1
        assert engine.scripted.rows_computed <= rows + engine.block_size, "a part of a block at most"


def test_a_chunk_gives_way_to_other_idle_work(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        engine.loop.call(lambda: setattr(engine.pieces.scheduler, "idle_chunk", 8))
        stop, step = Event(), engine.engine_step.step
        engine.loop.post(lambda: stop.wait(PATIENCE) and None)
        engine.chunks.keep(PROMPT, "paper")
        typed = Sequence(Rows.of([3, *PROMPT[:40]]), Priority.IDLE)
        engine.submit(typed)
        was_read: list[bool] = []

        def stepped() -> None:
            step()
            if typed.finished.is_set():
                was_read.append(engine.chunks._kept["paper"].is_read)

        engine.loop._step = stepped
        stop.set()
        until(lambda: engine.chunks.progress("paper") is None)
        engine.loop.call(lambda: None)
        assert was_read[0] is False
        assert typed.finished.is_set()


def test_two_that_are_read_at_once_compute_what_they_share_once(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        stop = Event()
        engine.loop.post(lambda: stop.wait(PATIENCE) and None)
        for number in range(4):
            engine.chunks.keep([*PROMPT, number, number], f"paper {number}")
        stop.set()
        until(lambda: all(chunk.is_read for chunk in engine.chunks.list()))
        assert engine.scripted.rows_computed == len(PROMPT) + 4 * 2
        assert [chunk.present for chunk in engine.chunks.look() or engine.chunks.list()] == [
            len(PROMPT) + 2
        ] * 4


def test_a_document_is_on_disk_once_however_many_conversations_are_on_it(tmp_path: Path) -> None:
    store, owner = tmp_path / "kv", chunk_owner(PAPER)
    with on_disk(tmp_path, store) as engine:
        tokens = engine.chat(PAPER).begun_with(PAPER)
        engine.chunks.keep(tokens, "paper", owner=owner)
        until(lambda: engine.chunks.progress("paper") is None)
        until_written(engine)
        path = next(store.glob(f"*/{owner}.kv"))
        alone = path.stat().st_size
        for number in range(3):
            chat = engine.chat(PAPER)
            chat.owner = f"talk{number}"
            engine.scripted.script = say(engine, None, f"an answer to {number}")
            list(chat.send(f"question {number}", SamplingParams(temperature=0.0, max_tokens=40)))
            chat.settle(wait=True)
        until_written(engine)
        sizes = [file.stat().st_size for file in store.glob("*/talk*.kv")]
        assert path.stat().st_size == alone
        assert len(sizes) == 3
        assert max(sizes) < alone / 2
    with on_disk(tmp_path, store) as engine:
        assert engine.kept_tokens(tokens) == len(tokens) // engine.block_size * engine.block_size
        engine.scripted.rows_computed = 0
        chat = engine.chat(PAPER)
        chat.settle(wait=True)
        assert engine.scripted.rows_computed < engine.block_size
        assert engine.kept_tokens(tokens) == len(tokens)
    forget(store, owner)
    with on_disk(tmp_path, store) as engine:
        assert engine.kept_tokens(tokens) == 0


def test_what_is_shared_is_written_before_who_shares_it(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        engine.warm(PROMPT)

        def wish() -> None:
            engine.disk.request_write("talk", PROMPT)
            engine.disk.request_write(chunk_owner("paper"), PROMPT)
            engine.disk.request_write("another", PROMPT)

        engine.loop.call(wish)
        until_written(engine)
    sizes = {path.stem: path.stat().st_size for path in store.glob("*/*.kv")}
    whole, blocks = sizes.pop(chunk_owner("paper")), len(PROMPT) // 4
    assert max(sizes.values(), default=0) <= whole * disk.WRITING / blocks, "what was on its way to the disk"


def test_an_engine_that_ends_writes_what_is_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "CLOSING_S", PATIENCE)
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        engine.save("one", Rows.of(PROMPT))
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT) == (expected, 1)
        never = Sequence(Rows.of([9, *PROMPT]), Priority.IDLE)
        engine.submit(never)
        engine.save("two", Rows.of([9, *PROMPT]))
        engine.close()
        assert never.finished.wait(PATIENCE)


def test_an_engine_that_ends_waits_for_a_slow_disk_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "CLOSING_S", 0.05)
    go, waited = Event(), []
    append = Folder.append

    def slow(self: Folder, *given: object) -> bool:
        waited.append(go.wait(PATIENCE))
        return append(self, *given)

    monkeypatch.setattr(Folder, "append", slow)
    finish = DiskTier.finish

    def finished(self: DiskTier) -> None:
        finish(self)
        go.set()

    monkeypatch.setattr(DiskTier, "finish", finished)
    with on_disk(tmp_path, tmp_path / "kv") as engine:
        answer(engine, PROMPT)
        engine.save("one", Rows.of(PROMPT))
        engine.close()
    assert 0 < len(waited) < len(PROMPT) // engine.block_size, "what was not handed over is not written"


def test_of_a_prompt_whose_reading_was_stopped_only_what_was_reached_counts_as_present(
    tmp_path: Path,
) -> None:
    with tiny_engine(tmp_path) as engine:
        chat = engine.chat()
        step = engine.engine_step.step

        def stopped() -> None:
            step()
            if engine.scripted.rows_computed:
                chat.stop()

        engine.loop.call(lambda: setattr(engine.loop, "_step", stopped))
        assert list(chat.send(PAPER, GREEDY)) == []
        assert chat.last is not None
        assert chat.present_tokens is not None
        assert 0 < chat.present_tokens < chat.used_tokens
        engine.loop.call(lambda: setattr(engine.loop, "_step", step))
        chat.settle(wait=True)
        assert chat.present_tokens is None, "all of it"
