"""A database that cannot be used: one line says so, the chat goes on, and nothing of it is lost if it can be helped."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from threading import Event

import pytest

from chatterm.sessions import fallback_database
from chatterm.sessions.fallback_database import FallbackDatabase, Op
from chatterm.sessions.library import DocumentLibrary
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.schema import VERSION, connect
from chatterm.sessions.store import SessionStore
from tests.chatterm.sessions.saved import conversation
from tests.counting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatterm.sessions.schema.LOCK_WAIT", 0.05)
    monkeypatch.setattr(fallback_database, "_RETRY", 0.2)


@pytest.fixture
def locked(path: Path) -> Iterator[Callable[[], None]]:
    """Locks the database of `path`; calling it gives the lock back."""
    connect(path).close()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")

    def unlock() -> None:
        if other.in_transaction:
            other.execute("ROLLBACK")

    yield unlock
    unlock()
    other.close()


def is_one_line(text: str) -> bool:
    return bool(text) and "\n" not in text and len(text) < 500 and "Traceback" not in text


def works_in_memory(store: SessionStore) -> str:
    """Chat in a store whose disk does not work."""
    session, tree = conversation(store, "in memory", "only")
    store.draft(session, "a draft")
    store.add_prompt("only")
    store.flush()
    assert is_one_line(store.problem), store.problem
    assert "in memory" in store.problem
    info, loaded, draft = store.load(session)
    assert (info.title, loaded.exchanges, loaded.head, draft) == ("in memory", tree.exchanges, 2, "a draft")
    assert session in [found.id for found in store.find("memory")]
    assert store.prompts(1) == ["only"]
    return session


def test_locked_at_the_start_and_free_later(path: Path, locked: Callable[[], None]) -> None:
    store = SessionStore.open(path)
    session = works_in_memory(store)
    assert "locked" in store.problem
    locked()
    until(lambda: store.problem == "")
    assert store.load(session)[1].head == 2
    assert store.close()
    again = SessionStore.open(path)
    assert [exchange.user for exchange in again.load(session)[1].exchanges] == ["in memory", "only"]
    assert again.load(session)[2] == "a draft"
    assert again.prompts(5) == ["only"]
    again.close()


def test_who_writes_does_not_wait_for_a_lock(
    path: Path, locked: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever waited here would wait in vain: this thread gives the lock back only when all of it is said.
    monkeypatch.setattr("chatterm.sessions.schema.LOCK_WAIT", PATIENCE)
    store = SessionStore.open(path)
    session, _ = conversation(store, *map(str, range(50)))
    store.draft(session, "a draft")
    store.delete(session)
    locked()
    store.flush()
    assert store.problem == ""
    assert store.close()


def test_locked_in_the_middle_of_a_session(store: SessionStore) -> None:
    session, tree = conversation(store, "before")
    deleted, _ = conversation(store, "to be deleted")
    store.flush()
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    exchange = tree.add(1, "meanwhile", "m")
    store.save(session, exchange)
    store.head(session, 2)
    store.rename(session, "Renamed")
    store.delete(deleted)
    store.flush()
    assert "locked" in store.problem
    exchange.text, exchange.finish_reason = "an answer", "eos"
    store.save(session, exchange)
    info, loaded, _ = store.load(session)
    assert loaded.exchanges == tree.exchanges, "what is on the disk and what is not, as one"
    assert (loaded.head, info.title, info.exchanges) == (2, "Renamed", 2)
    assert [found.id for found in store.find()] == [session]
    assert [found.exchanges for found in store.find("before")] == [2]
    with pytest.raises(SessionError, match="Unknown session"):
        store.load(deleted)
    other.execute("ROLLBACK")
    other.close()
    until(lambda: store.problem == "")
    assert store.close()
    again = SessionStore.open(store.path)
    assert again.load(session)[1].exchanges == tree.exchanges
    assert [info.title for info in again.find()] == ["Renamed"]
    again.close()


def test_a_session_deleted_by_who_has_locked_the_disk(store: SessionStore) -> None:
    session, tree = conversation(store, "before")
    renamed, _ = conversation(store, "only renamed")
    store.flush()
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("PRAGMA foreign_keys = ON")
    other.execute("BEGIN IMMEDIATE")
    store.save(session, tree.add(1, "meanwhile", "m"))
    store.head(session, 2)
    store.rename(renamed, "Renamed")
    store.flush()
    assert "locked" in store.problem
    other.execute("DELETE FROM sessions")
    other.execute("COMMIT")
    other.close()
    until(lambda: store.problem == "")
    assert store.close()
    again = SessionStore.open(store.path)
    assert [info.id for info in again.find()] == [session]
    assert again.load(session)[1].exchanges == tree.exchanges
    assert again.load(session)[1].head == 2
    again.close()


def test_what_is_changed_while_the_disk_cannot_even_be_read(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, tree = conversation(store, "before", "after")
    untouched, _ = conversation(store, "another", "one")
    store.head(session, 1)
    store.flush()

    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    disk = store._ask(lambda database: database._disk)
    assert disk is not None
    for name in ("info", "head", "has", "update", "set_head"):
        monkeypatch.setattr(disk, name, refuse, raising=True)
    monkeypatch.setattr(fallback_database, "_RETRY", 2.0)
    store.rename(session, "Renamed")
    store.head(untouched, 1)
    store.flush()
    with pytest.raises(SessionError, match="locked"):
        store.load(session)
    store._ask(lambda database: setattr(database, "_disk", None))  # nor opened
    with pytest.raises(SessionError, match="cannot be read now"):
        store.load(session)
    assert store.find() == []
    until(lambda: store.problem == "")  # with a connection of its own
    assert store.close()
    again = SessionStore.open(store.path)
    info, loaded, _ = again.load(session)
    assert (info.title, loaded.head, loaded.exchanges) == ("Renamed", 1, tree.exchanges)
    assert again.load(untouched)[1].head == 1
    again.close()


def test_closing_tries_once_more(
    path: Path, locked: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback_database, "_RETRY", 1000.0)
    store = SessionStore.open(path)
    session = works_in_memory(store)
    locked()
    assert store.problem
    assert store.close()
    again = SessionStore.open(path)
    assert again.load(session)[1].head == 2
    again.close()


def test_closing_says_when_something_is_not_on_the_disk(path: Path, locked: Callable[[], None]) -> None:
    store = SessionStore.open(path)
    works_in_memory(store)
    assert not store.close()
    assert "locked" in store.problem
    assert store.farewell == (
        "Another program has locked the session database: the last messages are not saved. Close that program."
    )


def test_a_full_disk_and_room_again(store: SessionStore) -> None:
    session, tree = conversation(store, "before")
    store.flush()

    def fill(database: FallbackDatabase) -> None:
        assert database._disk is not None
        database._disk.connection.execute("PRAGMA max_page_count = 1")

    store._ask(fill)
    exchange = tree.add(1, "long " * 50_000, "m")
    store.save(session, exchange)
    store.flush()
    assert "no disk space left" in store.problem
    assert is_one_line(store.problem)
    assert store.load(session)[1].exchanges == tree.exchanges
    until(lambda: store.problem == "")  # trying again opens the file anew, without the limit
    assert store.close()
    again = SessionStore.open(store.path)
    assert again.load(session)[1].exchanges == tree.exchanges
    again.close()


def test_a_newer_version_is_left_alone(path: Path) -> None:
    connection = connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION + 6}")
    connection.close()
    before = path.read_bytes()
    store = SessionStore.open(path)
    works_in_memory(store)
    assert f"newer chatterm (format {VERSION + 6}; this one reads {VERSION})" in store.problem
    assert not store.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"no database at all " * 500, b"SQLite format 3\x00" + b"\x07" * 5000])
def test_a_damaged_file_is_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    store = SessionStore.open(path)
    works_in_memory(store)
    assert "damaged" in store.problem
    assert not store.close()
    assert path.read_bytes() == content


def test_a_schema_that_is_no_text_any_more(store: SessionStore) -> None:
    """SQLite quotes it in its error, which Python cannot read then."""
    assert store.close()
    data = store.path.read_bytes()
    broken = data.replace(b"tablesessionssessions", b"table\x9eessionssessions", 1)
    assert broken != data
    store.path.write_bytes(broken)
    again = SessionStore.open(store.path)
    works_in_memory(again)
    assert "damaged" in again.problem
    assert not again.close()
    with pytest.raises(SessionError, match="damaged"):
        DocumentLibrary(store.path).entries()


def test_damage_that_shows_later(store: SessionStore) -> None:
    session, tree = conversation(store, *(f"message {number} " * 50 for number in range(300)))
    assert store.close()
    data = bytearray(store.path.read_bytes())
    data[4096 * 3 :] = b"\x55" * (len(data) - 4096 * 3)
    store.path.write_bytes(data)
    again = SessionStore.open(store.path)
    with pytest.raises(SessionError, match="damaged") as caught:
        again.load(session)
    assert is_one_line(str(caught.value))
    again.save(session, tree.add(300, "and now?", "m"))
    again.flush()
    assert "damaged" in again.problem
    assert not again.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = SessionStore.open(tmp_path / "file" / "sessions.db")
    works_in_memory(store)
    assert "cannot be written" in store.problem
    assert not store.close()


def test_read_only(tmp_path: Path) -> None:
    """Where root runs the tests, a process without its rights does this one: modes do not bind root."""
    folder = Path(mkdtemp(prefix="chatterm-")) if os.getuid() == 0 else tmp_path
    path = folder / "sessions.db"
    store = SessionStore.open(path)
    session, _ = conversation(store, "before")
    assert store.close()
    path.chmod(0o444)
    folder.chmod(0o555)
    code = (
        "import sys; sys.path[:0] = sys.argv[3:]; from pathlib import Path\n"
        "from chatterm.sessions.store import SessionStore\n"
        "import os\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "store = SessionStore.open(Path(sys.argv[1])); session = sys.argv[2]\n"
        "info, tree, _ = store.load(session); assert info.title == 'before'\n"
        "print(store.problem)\n"
        "store.save(session, tree.add(1, 'meanwhile', 'm'))\n"
        "print([exchange.user for exchange in store.load(session)[1].exchanges])\n"
        "print(store.close())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), session, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    folder.chmod(0o755)
    if folder != tmp_path:
        path.unlink()
        folder.rmdir()
    assert done.returncode == 0, done.stderr
    problem, users, closed = done.stdout.splitlines()
    assert "cannot be written" in problem
    assert users == "['before', 'meanwhile']"
    assert closed == "False"


def test_who_leaves_does_not_wait_for_a_disk_that_stalls(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Event()
    monkeypatch.setattr(FallbackDatabase, "find", lambda database, text: gate.wait(2 * PATIENCE) and [])
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(store.find), pool.submit(store.prompts)]
        until(lambda: len(store._awaited) == 2)
        store.release()
        for one in asked:
            with pytest.raises(SessionError, match="closed"):
                one.result(PATIENCE)
    gate.set()
    assert store.prompts() == []  # what comes too late breaks nothing


def test_a_mistake_of_the_program_ends_nothing(store: SessionStore) -> None:
    session, tree = conversation(store, "before")
    store.flush()
    exchange = tree.add(1, "x", "m")
    exchange.token_ids = [2**40]
    store.save(session, exchange)
    store._post(
        "bad", Op(None, lambda db: db.connection.executescript("SELECT nothing FROM nowhere").close())
    )
    store.flush()
    assert is_one_line(store.problem)
    exchange.token_ids = [2]
    store.save(session, exchange)
    until(lambda: store.problem == "")
    assert store.load(session)[1].exchanges == tree.exchanges


def test_a_session_that_was_only_in_memory_is_found_and_deleted(
    path: Path, locked: Callable[[], None]
) -> None:
    store = SessionStore.open(path)
    session = works_in_memory(store)
    store.delete(session)
    assert store.find() == []
    locked()
    until(lambda: store.problem == "")
    assert store.find() == []
    assert store.new(SessionInfo())
    assert store.close()
