"""The store while all is well: what is saved is there again, whoever asks."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from threading import current_thread

import pytest

from chatterm.backends.backend import Exchange, TokenEvent, ToolCall, ToolResult
from chatterm.sessions import schema
from chatterm.sessions.database import Database
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from tests.chatterm.sessions.saved import conversation
from tests.counting import PATIENCE, calls_in, until


def reopened(store: SessionStore) -> SessionStore:
    assert store.close()
    return SessionStore.open(store.path)


def test_everything_of_an_exchange_survives(store: SessionStore) -> None:
    info = SessionInfo(
        model="qwen3",
        system="Be terse.",
        think="on",
        think_cache="mask",
        sampling={"top_k": 3, "stop": ("A", "ß")},
    )
    session = store.new(info)
    said = Exchange(
        1,
        None,
        "Grüße \x00 🎈",
        text="a\nb",
        reasoning="hm",
        token_ids=[151_667, 0, 2**31 - 1],
        shown=(1, 2),
        opening=[7, 8],
        finish_reason="eos",
        stats={"ttft_s": 0.25, "prompt_tokens": 12},
        model="qwen3",
        created=1_700_000_000.123456,
        thinking_s=1.5,
    )
    store.save(session, said)
    store.head(session, 1)
    again = reopened(store)
    loaded, tree, draft = again.load(session)
    assert tree.exchanges == [said]
    assert tree.head == 1
    assert draft == ""
    assert (loaded.system, loaded.think, loaded.think_cache, loaded.sampling) == (
        info.system,
        info.think,
        info.think_cache,
        info.sampling,
    )
    assert (loaded.exchanges, loaded.tokens) == (1, 3)
    again.close()


def test_branches_and_the_selected_one(store: SessionStore) -> None:
    session, tree = conversation(store, "one", "two", "three")
    for parent in (1, None):
        store.save(session, tree.add(parent, "edited", "smollm2"))
    tree.select(4)
    store.head(session, 4)
    _, loaded, _ = store.load(session)
    assert loaded.exchanges == tree.exchanges
    assert loaded.head == 4
    store.drop(session, 5)
    store.head(session, None)
    _, loaded, _ = store.load(session)
    assert [exchange.id for exchange in loaded.exchanges] == [1, 2, 3, 4]
    assert loaded.head is None


def test_a_later_change_of_the_exchange_does_not_reach_what_was_saved(store: SessionStore) -> None:
    session, tree = conversation(store, "one")
    exchange = tree[1]
    store.save(session, exchange)
    exchange.text = "changed"
    exchange.token_ids.append(5)
    _, loaded, _ = store.load(session)
    assert (loaded[1].text, loaded[1].token_ids) == ("You said: one", [0, 50_000, 2])


def test_a_running_answer_is_written_in_batches_and_nothing_twice(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatterm.sessions.store._BATCH", PATIENCE)  # only who flushes ends a batch
    session, tree = conversation(store, "one")
    exchange = tree.add(1, "go", "m")
    store.save(session, exchange)
    store.flush()
    with closing(sqlite3.connect(store.path)) as reader:
        records = "SELECT at, length(ids) / 4, length(text), length(reasoning) FROM journal ORDER BY at"
        for number in range(500):
            event = TokenEvent("x", number, "reasoning" if number < 100 else "answer")
            exchange.add((event,))
            store.say(session, exchange, (event,))
            if number % 100 == 99:
                store.flush()
        found = reader.execute(records).fetchall()
        assert len(found) == 5
        ends = [at + count for at, count, _, _ in found]
        assert [at for at, _, _, _ in found] == [0, *ends[:-1]]
        assert ends[-1] == sum(text + why for _, _, text, why in found) == 500
        assert reader.execute("SELECT tokens FROM exchanges WHERE id = 2").fetchone() == (0,)
        loaded = store.load(session)[1][2]
        assert loaded == exchange
        assert store.find()[0].tokens == 500 + len(tree[1].token_ids)
        exchange.finish_reason = "eos"
        store.save(session, exchange)
        store.flush()
        assert reader.execute(records).fetchall() == []
    assert store.load(session)[1][2] == exchange


def test_tokens_reach_the_disk_by_themselves(store: SessionStore) -> None:
    session, tree = conversation(store, "one")
    exchange = tree.add(1, "go", "m")
    store.save(session, exchange)
    store.flush()
    with closing(sqlite3.connect(store.path)) as reader:
        event = TokenEvent("x", 7, "answer")
        store.say(session, exchange, (event,))
        until(lambda: reader.execute("SELECT 1 FROM journal").fetchall())


def test_what_comes_too_late_is_not_added(store: SessionStore) -> None:
    session, tree = conversation(store, "one")
    exchange = tree.add(1, "go", "m")
    store.save(session, exchange)
    event = TokenEvent("x", 7, "answer")
    store.say(session, exchange, (event,))
    exchange.finish_reason = "cancelled"
    store.save(session, exchange)
    store.say(session, exchange, (event,))
    assert store.load(session)[1][2].token_ids == []
    store.drop(session, 2)
    store.say(session, exchange, (event,))
    store.flush()
    assert 2 not in store.load(session)[1]


def test_an_exchange_that_goes_takes_its_records_along(store: SessionStore) -> None:
    session, tree = conversation(store, "one")
    for work in (lambda: store.drop(session, 2), lambda: store.delete(session)):
        exchange = tree.add(1, "go", "m")
        store.save(session, exchange)
        store.say(session, exchange, (TokenEvent("x", 7, "answer"),))
        store.flush()
        work()
        store.flush()
        with closing(sqlite3.connect(store.path)) as reader:
            assert reader.execute("SELECT * FROM journal").fetchall() == []
        tree.drop(exchange.id)


def test_a_format_without_a_journal_is_brought_up_to_date(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        for statement in filter(str.strip, schema._MIGRATIONS[0].split(";")):
            old.execute(statement)
        old.execute("PRAGMA user_version = 1")
        old.execute("INSERT INTO sessions VALUES ('s', 't', 'm', NULL, 'auto', 'exact', '{}', 1, 1, 1)")
        values = "'s', 1, NULL, 1, 'm', 'eos', 0, 0, 0, 1, '{}', x'', 'hello', 'you', '', x'05000000'"
        old.execute(f"INSERT INTO exchanges VALUES ({values})")
    reading = schema.connect_read_only(path)
    assert reading is not None
    assert [e.token_ids for e in Database(reading).exchanges("s")] == [[5]]
    reading.close()
    store = SessionStore.open(path)
    exchange = store.load("s")[1][1]
    assert (exchange.text, exchange.seed) == ("you", None)
    exchange.seed = 2**63 - 1
    store.save("s", exchange)
    assert store.load("s")[1][1].seed == 2**63 - 1
    exchange.calls, exchange.results = [ToolCall("read", "{}")], [ToolResult("a", "{}", "b", "failed", 1.5)]
    store.save("s", exchange)
    assert store.load("s")[1][1].calls == exchange.calls
    assert store.load("s")[1][1].results == exchange.results
    assert store.close()


def test_a_session_begins_with_its_first_exchange(store: SessionStore) -> None:
    session = store.new(SessionInfo(model="m"))
    store.update(session, model="other", system="S")
    store.head(session, None)
    store.draft(session, "half a mess")
    assert store.find() == []
    info, tree, draft = store.load(session)
    assert (info.model, len(tree), draft) == ("other", 0, "half a mess")
    assert store.new_draft() == "half a mess"
    store.save(session, tree.add(None, "half a message", "other"))
    assert store.new_draft() == ""
    [info] = store.find()
    assert (info.id, info.title, info.model, info.system) == (session, "half a message", "other", "S")


def test_a_first_message_that_was_refused_leaves_no_session(store: SessionStore) -> None:
    session, tree = store.new(SessionInfo(model="m")), Tree()
    store.save(session, tree.add(None, "far too long", "m"))
    store.flush()
    store.drop(session, 1)
    store.draft(session, "far too")
    assert store.find() == []
    assert store.new_draft() == "far too"
    tree.drop(1)
    store.save(session, tree.add(None, "short", "m"))
    [info] = store.find()
    assert (info.id, info.title, info.exchanges) == (session, "short", 1)
    assert store.was_deleted(session) == ""


def test_an_exchange_that_was_refused_takes_nobody_elses_with_it(store: SessionStore) -> None:
    session, tree = conversation(store, "hello")
    store.flush()
    other = SessionStore.open(store.path)
    theirs = Tree(other.load(session)[1].exchanges, 1)
    other.save(session, theirs.add(1, "from there", "m"))
    assert other.close()
    store.save(session, tree.add(1, "refused", "m"))
    store.drop(session, 2)
    assert [exchange.user for exchange in store.load(session)[1].exchanges] == ["hello", "from there"]


def test_the_title_is_the_first_message_until_there_is_another(store: SessionStore) -> None:
    session, tree = conversation(store, "\x1b[31m# Why is the sky\x07 blue?\nReally.", "and red")
    assert store.latest().title == "Why is the sky blue?"  # type: ignore[union-attr]
    store.rename(session, "Sky\x1b]0;owned\x07 colours\n")
    store.save(session, tree.add(None, "a new beginning", "m"))
    assert [info.title for info in store.find()] == ["Sky colours"]


def test_titles_in_the_file_are_not_believed(store: SessionStore) -> None:
    session, _ = conversation(store, "hello")
    store.flush()
    with sqlite3.connect(store.path) as other:
        other.execute("UPDATE sessions SET title = ?, think = 'maybe', sampling = '[1'", ("\x1b[2Jx\ny",))
    other.close()
    [info] = store.find()
    assert (info.id, info.title, info.think, info.sampling) == (session, "x y", "auto", {})


def test_search_needs_every_word_anywhere(store: SessionStore) -> None:
    first, _ = conversation(store, "The Übermensch walks", "about 100% of the time")
    second, _ = conversation(store, "cats", "and dogs")
    assert [info.id for info in store.find()] == [second, first]
    for text, expected in {
        "WALKS time": [first],
        "übermensch": [first],
        "100%": [first],
        "a%t": [],
        "you said": [second, first],
        "cats walks": [],
        "dog": [second],
        "'; DROP TABLE sessions; --": [],
    }.items():
        assert [info.id for info in store.find(text)] == expected, text


def test_a_deleted_session_is_gone_from_the_file(store: SessionStore) -> None:
    session, tree = conversation(store, "the secret word is xylophonist")
    kept, _ = conversation(store, "other")
    store.draft(session, "xylophonist draft")
    store.delete(session)
    store.save(session, tree[1])  # too late
    assert [info.id for info in store.find()] == [kept]
    with pytest.raises(SessionError, match="Unknown session"):
        store.load(session)
    for file in store.path.parent.iterdir():
        assert b"xylophonist" not in file.read_bytes(), file


def test_drafts(store: SessionStore) -> None:
    session, _ = conversation(store, "hello")
    for text in ("h", "ha", "half \ud800"):
        store.draft(session, text)
    store.draft(None, "elsewhere")
    again = reopened(store)
    assert again.load(session)[2] == "half ?"
    assert again.new_draft() == "elsewhere"
    again.draft(session, "")
    assert again.load(session)[2] == ""
    again.close()


def test_prompts_across_sessions(store: SessionStore) -> None:
    for text in ("a", "b", "a", "c\nd"):
        store.add_prompt(text)
    assert store.prompts(10) == ["b", "a", "c\nd"]
    assert store.prompts(1) == ["c\nd"]
    for number in range(1005):
        store.add_prompt(str(number))
    assert store.prompts(5000) == [str(number) for number in range(5, 1005)]


def test_a_whole_session_from_elsewhere(store: SessionStore) -> None:
    _, tree = conversation(store, "one", "two")
    added = store.add(SessionInfo(title="From there", model="m", created=5.0), tree.exchanges, 1)
    info, loaded, _ = store.load(added)
    assert (info.title, info.created, loaded.head) == ("From there", 5.0, 1)
    assert loaded.exchanges == tree.exchanges
    assert info.updated == max(exchange.created for exchange in tree.exchanges)
    info, _, _ = store.load(store.add(SessionInfo(), tree.exchanges, None))
    assert (info.title, info.created) == ("one", tree[1].created)


def test_two_programs_in_one_session_lose_nothing(store: SessionStore) -> None:
    session, tree = conversation(store, "hello")
    store.flush()
    other = SessionStore.open(store.path)
    _, theirs, _ = other.load(session)
    theirs.add(1, "from there", "m").created = 5.0
    other.save(session, theirs[2])
    other.flush()
    for number in (2, 3):
        store.save(session, tree.add(number - 1, f"from here {number}", "m"))
    store.save(session, tree[2])
    store.head(session, 3)
    store.flush()
    _, both, _ = other.load(session)
    assert sorted(exchange.user for exchange in both.exchanges) == [
        "from here 2",
        "from here 3",
        "from there",
        "hello",
    ]
    assert [exchange.user for exchange in both.path(both.head)] == ["hello", "from here 2", "from here 3"]
    assert other.close()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_session_that_another_program_deleted_begins_again_with_all_that_was_said(
    store: SessionStore, loaded: bool
) -> None:
    session, tree = conversation(store, "hello", "again")
    store.update(session, system="Be brief.")
    store.flush()
    here = reopened(store) if loaded else store
    if loaded:
        here.load(session)
    answer = tree.add(2, "go on", "m")
    here.save(session, answer)
    here.head(session, 3)
    here.flush()
    other = SessionStore.open(store.path)
    other.delete(session)
    other.flush()
    assert other.find() == []
    here.update(session, title="Found again")  # this alone does not bring it back
    here.flush()
    assert other.find() == []
    event = TokenEvent("word", 7, "answer")
    answer.add((event,))
    here.say(session, answer, (event,))
    info, found, _ = here.load(session)
    assert found.exchanges == tree.exchanges
    assert (found.head, info.title, info.system) == (3, "Found again", "Be brief.")
    assert [info.id for info in other.find()] == [session]
    assert here.close()
    assert other.close()


def test_what_two_programs_know_of_a_deleted_session_is_not_mixed_up(store: SessionStore) -> None:
    session, ours = conversation(store, "one")
    store.flush()
    other = SessionStore.open(store.path)
    _, theirs, _ = other.load(session)
    for tree, told, text in ((theirs, other, "their two"), (ours, store, "our two")):
        told.save(session, tree.add(1, text, text))
        told.flush()  # our 2 is a 3 in the file
    store.save(session, ours.add(1, "another answer to one", "m"))
    store.flush()
    third = SessionStore.open(store.path)
    third.delete(session)
    assert third.close()
    other.save(session, theirs.add(2, "their three", "m"))
    other.flush()
    newest = ours.add(2, "our three", "m")
    store.save(session, newest)
    store.flush()
    event = TokenEvent("word", 7, "answer")
    store.say(session, newest, (event,))
    _, found, _ = other.load(session)
    assert {
        exchange.user: [each.user for each in found.path(exchange.parent)] for exchange in found.exchanges
    } == {
        "one": [],
        "their two": ["one"],
        "our two": ["one"],
        "another answer to one": ["one"],
        "their three": ["one", "their two"],
        "our three": ["one", "our two"],
    }
    assert other.close()


def test_nobody_else_may_read_it(store: SessionStore) -> None:
    conversation(store, "private")
    store.flush()
    for file in store.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_the_folder_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "here"))
    store = SessionStore.open()
    conversation(store, "hello")
    assert store.close()
    assert (tmp_path / "here" / "sessions.db").exists()


def test_nothing_is_lost_by_closing_and_nothing_works_afterwards(store: SessionStore) -> None:
    session, tree = conversation(store, "one")
    exchange = tree.add(1, "two", "m")
    exchange.text = "half an ans"
    store.save(session, exchange)
    assert store.close()
    assert store.close()
    with pytest.raises(SessionError, match="closed"):
        store.find()
    again = SessionStore.open(store.path)
    assert again.load(session)[1][2] == exchange
    again.close()


def test_a_session_of_2000_messages_is_read_with_few_statements(store: SessionStore) -> None:
    session, tree = store.new(SessionInfo()), Tree()
    for number in range(2000):
        exchange = tree.add(tree.head, f"message {number} " * 10, "m")
        exchange.text, exchange.token_ids = "word " * 200, list(range(260))
        exchange.stats = {f"figure_{i}": 1.5 for i in range(9)}
        store.save(session, exchange)
    store.flush()
    assert store.path is not None
    with closing(Database(schema.connect(store.path))) as database:
        statements: list[str] = []
        database.connection.set_trace_callback(statements.append)
        assert len(database.exchanges(session)) == 2000
        assert len(statements) < 5


def test_saving_a_long_answer_holds_nobody_up(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied; what takes long, the database, is left to another thread."""
    writers: list[str] = []
    put = Database.put

    def noted(db: Database, session: str, exchange: Exchange) -> None:
        writers.append(current_thread().name)
        put(db, session, exchange)

    monkeypatch.setattr(Database, "put", noted)
    session, tree = conversation(store, "one")
    exchange = tree.add(1, "write a book", "m")
    exchange.text, exchange.token_ids = "word " * 100_000, list(range(100_000))
    assert calls_in(lambda: store.save(session, exchange)) < 100
    store.flush()
    assert set(writers) == {"sessions"}
