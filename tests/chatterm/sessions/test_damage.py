"""A session database that is damaged anywhere is read as it was, or refused in one line; nothing else comes of it."""

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import Compaction, Document, TokenEvent, ToolCall, ToolResult
from chatterm.sessions.dates import stamp
from chatterm.sessions.export import exported
from chatterm.sessions.library import DocumentLibrary
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.schema import connect
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from engine.events import TurnStats
from engine.params import SamplingParams
from tests.chatterm.sessions.saved import conversation
from tests.fresh import seeds

DOCUMENT = Document("document", "the text of a document")
SAMPLING = {"temperature": 0.5, "top_k": 3, "stop": ("x",), "seed": 4, "speculation": "off"}


@pytest.fixture
def whole(path: Path) -> bytes:
    """A small database with something in every table."""
    store = SessionStore.open(path)
    info = SessionInfo(model="m", system="s", think="on", sampling=dict(SAMPLING), documents=(DOCUMENT,))
    for _ in range(2):
        session, tree = store.new(info), Tree()
        for number in range(3):
            exchange = tree.add(tree.head if number != 2 else 1, f"message {number}", "m")
            exchange.text, exchange.finish_reason = f"answer {number}", "eos"
            exchange.token_ids, exchange.shown, exchange.opening = [number, 50_000, 2], (0, 2), [5]
            exchange.stats = TurnStats(generated_tokens=3, prompt_tokens=9, ttft_s=0.5).to_dict()
            exchange.seed = 7
            exchange.calls = [ToolCall("read", '{"path": "a"}')]
            exchange.results = [ToolResult("read", '{"path": "a"}', "text")] if number else []
            exchange.compaction = Compaction("summary", True)
            store.save(session, exchange)
        running = tree.add(tree.head, "and now?", "m")
        store.save(session, running)
        store.flush()
        store.say(session, running, [TokenEvent("he", 7, "answer"), TokenEvent("llo", 8, "answer")])
        store.draft(session, "a draft")
        store.add_prompt(f"message {session}")
        store.head(session, running.id)
    store.flush()
    DocumentLibrary(path).add(DOCUMENT, "/somewhere/document")
    DocumentLibrary(path).count(DOCUMENT, "m", 7)
    other = connect(path)  # before the store closes: the journal is as it is while an answer runs
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    other.close()
    found = path.read_bytes()
    assert store.close()
    missing = [text for text in (b"answer 2", b"hello", b"a draft", b"/somewhere") if text not in found]
    assert not missing
    return found


def said(work: Callable[[], Any]) -> Any:
    """What `work` returns; None where it is refused, which takes one line."""
    try:
        return work()
    except SessionError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return None


def use(path: Path) -> None:
    """Read all that there is, and go on with every session."""
    store, library = SessionStore.open(path), DocumentLibrary(path)
    try:
        for text in (said(store.prompts), said(lambda: [store.new_draft()])):
            assert all(isinstance(line, str) for line in text or [])
        said(lambda: store.find("answer"))
        for info in said(store.find) or []:
            stamp(info.updated)
            said(lambda id=info.id: store.preview(id, "message"))
            found = said(lambda id=info.id: store.load(id))
            if found is None:
                continue
            loaded, tree, draft = found
            assert loaded.id == info.id
            assert isinstance(draft, str)
            SamplingParams(**loaded.sampling)
            for exchange in tree.exchanges:
                TurnStats.of(exchange.stats)
                assert exchange.ends_at is None or exchange.ends_at >= 0
            for format in ("md", "json", "html"):
                assert exported(loaded, tree, format)
            following = tree.add(tree.head, "more", "m")
            store.save(info.id, following)
            store.rename(info.id, "Renamed")
            store.flush()
        said(library.entries)
        said(lambda: library.find(["document"]))
        said(library.unread)
        assert all(isinstance(name, str) for name in library.names())
        assert len(store.problem.splitlines()) <= 1
    finally:
        store.close()


def put(path: Path, data: bytes) -> None:
    for file in path.parent.iterdir():
        file.unlink()
    path.write_bytes(data)


def test_what_is_whole_is_read(whole: bytes, path: Path) -> None:
    put(path, whole)
    use(path)
    store = SessionStore.open(path)
    infos = store.find()
    assert len(infos) == 2
    info, tree, draft = store.load(infos[0].id)
    assert (info.sampling, info.documents, draft) == (SAMPLING, (DOCUMENT,), "a draft")
    assert [exchange.text for exchange in tree.exchanges[2:]] == ["answer 2", "hello", ""]
    assert DocumentLibrary(path).find(["document"]) == (DOCUMENT,)
    store.close()


@pytest.mark.parametrize("seed", seeds(4))
def test_any_single_byte_may_be_another(whole: bytes, path: Path, seed: int) -> None:
    chance = random.Random(seed)
    places = [place for place, byte in enumerate(whole) if byte]  # most of the file is empty
    for _ in range(50):
        place = chance.choice(places)
        data = bytearray(whole)
        data[place] ^= chance.choice((1, 2, 4, 32, 128, 255))
        put(path, bytes(data))
        try:
            use(path)
        except Exception as error:
            raise AssertionError(f"byte {place} is {data[place]} and not {whole[place]}") from error


@pytest.mark.parametrize("value", [b"\xff", "\x00", 2**62, float("inf"), '{"stats": 1}', None])
def test_any_column_may_have_any_value(whole: bytes, path: Path, value: object) -> None:
    put(path, whole)
    with sqlite3.connect(path) as connection:
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        columns = [
            (table, name)
            for table in tables
            if not table.startswith("sqlite_")
            for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
        ]
    connection.close()
    assert ("journal", "state") in columns
    for table, name in columns:
        put(path, whole)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            first = f"{name} IS (SELECT {name} FROM {table} LIMIT 1)"
            connection.execute(f"UPDATE {table} SET {name} = ? WHERE {first}", (value,))
        except sqlite3.IntegrityError:
            continue  # SQLite itself lets no such value in
        finally:
            connection.close()
        try:
            use(path)
        except Exception as error:
            raise AssertionError(f"{table}.{name} is {value!r}") from error


def test_what_is_no_setting_is_left_out(whole: bytes, path: Path) -> None:
    put(path, whole)
    with sqlite3.connect(path) as connection:
        text = '{"temperature": "hot", "top_k": 3, "top_q": 0.5, "stop": 5, "seed": -1, "speculation": "off"}'
        connection.execute("UPDATE sessions SET sampling = ?", (text,))
    connection.close()
    store = SessionStore.open(path)
    assert [info.sampling for info in store.find()] == [{"top_k": 3, "speculation": "off"}] * 2
    store.close()


def test_text_that_is_none_any_more_is_called_damage(whole: bytes, path: Path) -> None:
    put(path, whole.replace(b"answer 2", b"answer\xff2"))
    store = SessionStore.open(path)
    for info in store.find():
        with pytest.raises(SessionError, match="is damaged"):
            store.load(info.id)
    store.close()


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_compaction_that_cannot_be_read_is_none(path: Path, text: str) -> None:
    store = SessionStore.open(path)
    session, _ = conversation(store, "hello")
    assert store.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE exchanges SET compaction = ?", (text,))
    store = SessionStore.open(path)
    assert store.load(session)[1][1].compaction is None
    assert store.close()
