"""A KV cache on disk that is full, slow, damaged, or not ours alone: a line says so, and the text is the same."""

import errno
import os
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from engine.cache.rows import Rows
from engine.store import records
from engine.store.folder import Folder, forget
from engine.store.records import HEADER
from tests.counting import PATIENCE, until
from tests.engine.keeping import answer, keep, on_disk, saved, until_written
from tests.fresh import seeds

PROMPT = [(17 * i) % 250 for i in range(120)]


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, os.strerror(errno.EIO)), ValueError("what\nis this")], ids=repr
)
@pytest.mark.parametrize("when", ["__init__", "begin", "append", "read"])
def test_a_disk_that_fails_is_one_line_and_the_text_the_same(
    tmp_path: Path, when: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        if when == "read":
            saved(engine, "one", PROMPT)

    def fails(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(Folder, when, fails)
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT)[0] == expected
        engine.save("two", Rows.of(PROMPT))
        until(lambda: bool(engine.figures().disk.problem))
        assert "\n" not in engine.figures().disk.problem
        assert answer(engine, PROMPT)[0] == expected


def test_who_waits_for_a_disk_that_hangs_is_answered_by_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go = tmp_path / "kv", Event()
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        saved(engine, "one", PROMPT)

    def hangs(fd: int, into: list[memoryview], *more: Any) -> int:
        assert len(into[0]) <= HEADER or go.wait(PATIENCE)  # heads are read at the start
        return read_now(fd, into, *more)

    read_now = os.preadv
    monkeypatch.setattr(os, "preadv", hangs)
    with on_disk(tmp_path, store, patience=0.05) as engine:
        assert answer(engine, PROMPT) == (expected, len(PROMPT))
        figures = engine.figures().disk
        assert figures.problem == ""
        assert figures.brought_s is not None, "it is known to be slow"
        engine.evict_all()
        go.set()
        until(lambda: engine.disk._buffers._free.qsize() == 4)  # every buffer came back
        engine.loop.call(lambda: engine.disk.costs.saw(500, 1e-6))
        assert not engine.figures().disk.is_used, "it is not waited for again"
        assert answer(engine, PROMPT) == (expected, len(PROMPT))
        engine.check()
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT) == (expected, 1), "the next run sees for itself"


def test_a_disk_that_is_full_in_the_middle_of_a_block_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "kv"
    left = [20_000]

    def full(fd: int, data: memoryview, at: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write_now(fd, data[: min(left[0], 700)], at)
        left[0] -= done
        return done

    write_now = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        engine.save("one", Rows.of(PROMPT))
        until(lambda: bool(engine.figures().notes))
        assert engine.figures().notes == (engine.figures().disk.problem,), "it is told once"
        assert "No space left" in engine.figures().notes[0]
        assert answer(engine, PROMPT)[0] == expected
        (path,) = store.rglob("one.kv")
        with path.open("rb") as file:
            found = list(records.scan(file.fileno()))
        assert found
        assert found[-1].end == path.stat().st_size, "nothing is behind the last whole block"
    left[0] = 10**9
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT) == (expected, len(PROMPT) - 4 * len(found))
        saved(engine, "one", PROMPT)
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT) == (expected, 1)


def test_a_conversation_that_is_deleted_while_it_is_written_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, handed = tmp_path / "kv", []
    append = Folder.append

    def deleted(self: Folder, owner: str, *block: Any) -> bool:
        handed.append(owner)
        if len(handed) == 3:
            forget(store, "one")
        return append(self, owner, *block)

    monkeypatch.setattr(Folder, "append", deleted)
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
        assert [*store.rglob("one.kv")] == []
        assert engine.figures().disk.blocks == 0
        saved(engine, "one", PROMPT)  # who goes on with it
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT) == (expected, 1)


def test_a_disk_that_may_only_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)

    def refuses(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY) and str(path).endswith(".kv"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_now(path, flags, *mode, **options)

    open_now = os.open
    monkeypatch.setattr(os, "open", refuses)
    with on_disk(tmp_path, store) as engine:
        assert answer(engine, PROMPT)[0] == expected
        engine.save("one", Rows.of(PROMPT))
        until(lambda: bool(engine.figures().notes))
        assert "Read-only" in engine.figures().notes[0]
        assert answer(engine, PROMPT)[0] == expected


def test_a_bit_that_is_flipped_changes_no_text(tmp_path: Path) -> None:
    store, chance = tmp_path / "kv", Random(3)
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
        (path,) = store.rglob("one.kv")
        whole = path.read_bytes()
        head = records.HEADER * 8
        for bit in [*chance.sample(range(head), 20), *chance.sample(range(8 * len(whole)), 30)]:
            engine.disk.close()
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            engine.evict_all()
            keep(engine, store)
            found, computed = answer(engine, PROMPT)
            assert found == expected, f"bit {bit}"
            assert computed > 1, f"bit {bit} was not noticed"
        engine.check()


@pytest.mark.parametrize("seed", seeds(3))
def test_two_engines_on_one_store_say_what_each_says_alone(tmp_path: Path, seed: int) -> None:
    """They write the same conversations, remove each other's for room, and one deletes what the other reads."""
    store, chance = tmp_path / "kv", Random(seed)
    prompts = [
        [(start + 7 * i) % 250 for i in range(length)] for start, length in enumerate((40, 61, 88, 120))
    ]
    with on_disk(tmp_path, store, most=10**9) as one:
        expected = [answer(one, prompt)[0] for prompt in prompts]
        token = one.pieces.cache.kv[:, :, :1].nbytes
    with (
        on_disk(tmp_path, store, most=200 * token) as one,
        on_disk(tmp_path, store, most=200 * token) as other,
    ):
        for _ in range(40):
            engine, number = chance.choice([one, other]), chance.randrange(len(prompts))
            match chance.randrange(4):
                case 0:
                    forget(store, f"talk-{number}")
                case 1:
                    engine.evict_all()
                    engine.disk.close()
                    keep(engine, store, most=200 * token)
            assert answer(engine, prompts[number])[0] == expected[number]
            engine.save(f"talk-{number}", Rows.of(prompts[number]))
            if chance.random() < 0.5:
                until_written(engine)
            assert not engine.figures().notes
            engine.check()


def test_a_cache_without_room_takes_what_fits(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with on_disk(tmp_path, store) as engine:
        expected, _ = answer(engine, PROMPT)
        saved(engine, "one", PROMPT)
    with on_disk(tmp_path, store, num_blocks=36, context=140) as engine:
        other = [(3 * i + 1) % 250 for i in range(100)]
        engine.warm(other)
        assert answer(engine, PROMPT)[0] == expected
        engine.check()
