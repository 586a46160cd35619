"""Sessions on the screen: saved as they happen, opened again, written to files and read from them."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.backends.backend import EngineError, TokenEvent
from chatterm.screens.sessions import SessionList
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from chatterm.settings.settings import SessionSettings, Settings
from chatterm.widgets.remarks import Remarks
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore.open(tmp_path / "sessions.db")


def reopened(store: SessionStore) -> SessionStore:
    assert store.close()
    return SessionStore.open(store.path)


def latest(store: SessionStore) -> str:
    info = store.latest()
    assert info is not None
    return info.id


class Refusing(ScriptedBackend):
    """Refuses every message, once the gate is open."""

    gate = threading.Event()

    def send(self, text: str) -> Iterator[TokenEvent]:
        self.calls.append(("send", text))
        while not self.gate.wait(0.005):
            pass
        raise EngineError("The server has gone.")


async def test_messages_that_wait_come_back_with_the_one_that_was_refused(store: SessionStore) -> None:
    backend = Refusing()
    backend.gate = threading.Event()
    async with driven(backend, store=store) as driver:
        for text in "abc":
            await driver.send(text, wait=False)
        backend.gate.set()
        await driver.until(lambda: driver.composer.text)
        await driver.idle()
        assert driver.composer.text == "a\nb\nc"
        assert [call for call in backend.calls if call[0] == "send"] == [("send", "a")]


async def test_a_session_deleted_elsewhere_is_saved_again_and_that_is_said(store: SessionStore) -> None:
    async with driven(
        ScriptedBackend([Script("One."), Script("Two."), Script("Three.")]), store=store
    ) as driver:
        await driver.send("first")
        other = SessionStore.open(store.path)
        session = latest(other)
        other.delete(session)
        other.flush()
        assert "deleted" not in driver.text()
        await driver.send("second")
        await driver.shows("Another program had deleted this conversation")
        assert [exchange.user for exchange in other.load(session)[1].exchanges] == ["first", "second"]
        await driver.pilot.press("escape")
        await driver.send("third")
        assert "deleted" not in driver.text(), "it is said once"
        other.close()
    store.close()


async def test_a_message_that_is_refused_after_its_conversation_was_left_is_kept(store: SessionStore) -> None:
    backend = Refusing()
    backend.gate = threading.Event()
    async with driven(backend, store=store) as driver:
        await driver.send("left behind", wait=False)
        await driver.until(lambda: ("send", "left behind") in backend.calls)
        await driver.send("/reset", wait=False)
        await driver.pilot.press("y")
        backend.gate.set()
        await driver.idle()
        assert driver.composer.text == ""
    (exchange,) = store.load(latest(store))[1].exchanges
    assert (exchange.user, exchange.text, exchange.finish_reason) == ("left behind", "", "cancelled")
    store.close()


async def test_what_was_said_is_there_after_the_program_ended(store: SessionStore) -> None:
    backend = ScriptedBackend([Script("one", cached=3), Script("uno"), Script("two")], system="Be terse.")
    async with driven(backend, store=store) as driver:
        await driver.send("first message")
        await driver.send("/retry")
        await driver.send("second")
        await driver.send("/rename My talk")
        await driver.types("a dra")
        await driver.until(lambda: store.load(latest(store))[2] == "a dra")
    store = reopened(store)
    info = store.latest()
    assert info is not None
    assert (info.title, info.model, info.system) == ("My talk", "scripted", "Be terse.")
    backend = ScriptedBackend([Script("three")])
    async with driven(backend, store=store, session=info.id) as driver:
        await driver.until(lambda: driver.answers == ["uno", "two"])
        assert driver.questions == ["first message", "second"]
        assert driver.composer.text == "a dra"
        assert "< 2/2 >" in driver.text()
        await driver.until(lambda: backend.history == [("first message", "uno"), ("second", "two")])
        driver.composer.put("")
        await driver.send("/stats")
        await driver.until(lambda: re.search(r"answers +– +3 +0 *\n", driver.text()))
        await driver.pilot.press("escape")
        await driver.pilot.press("alt+left")
        await driver.until(lambda: driver.answers == ["one"])
        await driver.send("third")
    tree = store.load(info.id)[1]
    assert [exchange.text for exchange in tree.path(tree.head)] == ["one", "three"]
    store.close()


async def test_guesses_may_come_from_other_branches_and_sessions(store: SessionStore) -> None:
    async with driven(ScriptedBackend([Script("earlier")]), store=store) as driver:
        await driver.send("another session")
    store = reopened(store)
    async with driven(ScriptedBackend([Script("one"), Script("uno")]), store=store) as driver:
        await driver.send("first message")
        await driver.send("/retry")
    store = reopened(store)
    session, backend = latest(store), ScriptedBackend()
    async with driven(backend, store=store, session=session) as driver:
        await driver.until(lambda: driver.answers == ["uno"])
        expected = ["first message", "another session"]
        await driver.until(lambda: [exchange.user for exchange in backend.known] == expected)
    store = reopened(store)
    backend, settings = ScriptedBackend(), Settings(sessions=SessionSettings(guesses=False))
    async with driven(backend, store=store, session=session, settings=settings) as driver:
        await driver.until(lambda: driver.answers == ["uno"])
        await driver.idle()
        assert backend.known == []
    store.close()


async def test_a_running_answer_is_saved_and_can_go_on(store: SessionStore, tmp_path: Path) -> None:
    script = Script("one two three four", gate=threading.Event(), gate_after=3)
    copy = tmp_path / "killed.db"
    async with driven(ScriptedBackend([script]), store=store) as driver:
        await driver.send("count", wait=False)
        await driver.until(lambda: driver.answers == ["one two thre"])
        await driver.until(lambda: store.load(latest(store))[1].exchanges[0].text == "one two thre")
        for path in tmp_path.glob("sessions.db*"):  # what a kill -9 would leave
            (tmp_path / path.name.replace("sessions", "killed")).write_bytes(path.read_bytes())
        await driver.pilot.press("escape")
        await driver.idle()
    store.close()
    store = SessionStore.open(copy)
    backend = ScriptedBackend([Script("e four")])
    async with driven(backend, store=store, session=latest(store)) as driver:
        await driver.shows("cut off when the program ended")
        await driver.send("/continue")
        assert driver.answers == ["one two three four"]
        assert store.load(latest(store))[1].exchanges[0].finish_reason == "eos"
    store.close()


async def test_a_draft_of_a_new_chat_comes_back(store: SessionStore) -> None:
    async with driven(ScriptedBackend(), store=store) as driver:
        await driver.types("half a th")
        await driver.until(lambda: store.new_draft() == "half a th")
    async with driven(ScriptedBackend(), store=store) as driver:
        await driver.until(lambda: driver.composer.text == "half a th")
        await driver.pilot.press("enter")
        await driver.idle()
        await driver.until(lambda: store.new_draft() == "")
        await driver.pilot.press("up")
        assert driver.composer.text == "half a th"
    async with driven(ScriptedBackend(), store=store) as driver:
        await driver.until(lambda: store.prompts() == ["half a th"])
        await driver.pilot.press("up")
        await driver.until(lambda: driver.composer.text == "half a th")
    store.close()


async def test_another_session_is_picked_and_its_model_is_loaded(store: SessionStore) -> None:
    tree = Tree()
    exchange = tree.add(None, "old question", "other")
    exchange.text, exchange.finish_reason = "old answer", "eos"
    info = SessionInfo(title="Old talk", model="other", system="Old.", think="off", sampling={"top_k": 3})
    old = store.add(info, tree.exchanges, tree.head)
    backend = ScriptedBackend()
    async with driven(backend, store=store) as driver:
        await driver.send("new question")
        await driver.pilot.press("f6")
        await driver.shows("Old talk")
        await driver.types("old")
        await driver.until(lambda: len(driver.app.screen.query_one(SessionList).items) == 1)
        await driver.pilot.press("enter")
        await driver.shows("old answer")
        await driver.until(lambda: backend.model == "other")
        await driver.idle()
        assert (backend.system, backend.think, backend.sampling) == ("Old.", "off", {"top_k": 3})
        assert backend.history == [("old question", "old answer")]
        assert driver.app.chat.conversation.saved.session == old
        await driver.send("/sessions new question")
        await driver.until(lambda: driver.questions == ["new question"])
        await driver.send("/sessions nonsense")
        await driver.until(lambda: driver.errors)
    store.close()


async def test_an_answer_ends_for_another_conversation_only_after_a_yes_and_is_kept(
    store: SessionStore,
) -> None:
    scripts = [Script("old"), Script("one two three", gate=threading.Event(), gate_after=2)]
    async with driven(ScriptedBackend(scripts), store=store) as driver:
        await driver.send("before")
        before = latest(store)
        await driver.send("/reset")
        await driver.send("long", wait=False)
        await driver.until(lambda: driver.answers == ["one two "])
        for no in ("n", "escape"):
            await driver.pilot.press("ctrl+n")
            await driver.shows("Stop the answer and begin a new conversation?")
            await driver.pilot.press(no)
            assert (driver.questions, driver.app.chat.conversation.turn is None) == (["long"], False)
        await driver.send(f"/sessions {before}", wait=False)
        await driver.shows("Stop the answer and open “before”? What it said is kept.")
        await driver.pilot.press("enter", "y")
        await driver.until(lambda: driver.answers == ["old"])
        await driver.idle()
    (exchange,) = store.load(next(info.id for info in store.find() if info.title == "long"))[1].exchanges
    assert (exchange.text.strip(), exchange.finish_reason) == ("one two", "cancelled")
    store.close()


async def test_each_conversation_keeps_its_draft(store: SessionStore) -> None:
    async with driven(ScriptedBackend(), store=store) as driver:
        for name in ("first", "second"):
            await driver.send(name)
            await driver.types(f"to {name}")
            await driver.pilot.press("ctrl+n")
            await driver.until(lambda: driver.composer.text == "")
        await driver.types("to none")
        for name in ("first", "second", "first"):
            await driver.pilot.press("ctrl+home")
            driver.app.chat.action_run_command("sessions", name)
            await driver.until(lambda name=name: driver.composer.text == f"to {name}")  # type: ignore[misc]
            assert driver.questions == [name]
        await driver.pilot.press("ctrl+n")
        await driver.until(lambda: driver.composer.text == "to none")
    store.close()


async def test_an_error_leaves_with_what_it_was_about(store: SessionStore) -> None:
    backend = Refusing()
    backend.gate = threading.Event()
    backend.gate.set()
    async with driven(backend, store=store) as driver:
        remarks = driver.app.chat.query_one(Remarks)
        await driver.send("a")
        await driver.until(lambda: "The server has gone." in remarks.texts)
        driver.app.chat.composer.put("")
        backend.send = super(Refusing, backend).send  # type: ignore[method-assign]
        await driver.send("b")
        await driver.until(lambda: driver.answers)
        await driver.idle()
        assert remarks.texts == []
        await driver.send("/branch next")
        assert len(remarks.texts) == 1
        await driver.pilot.press("ctrl+r")
        await driver.until(lambda: len(driver.app.chat.conversation.tree) == 2)
        await driver.idle()
        assert remarks.texts == []
        await driver.send("/branch 9")
        assert len(remarks.texts) == 1
        await driver.pilot.press("ctrl+n")
        await driver.until(lambda: remarks.texts == [])
    store.close()


async def test_a_new_conversation_leaves_the_old_one_saved(store: SessionStore) -> None:
    async with driven(ScriptedBackend(), store=store) as driver:
        await driver.send("one")
        await driver.pilot.press("ctrl+n")
        await driver.shows("/sessions opens it")
        await driver.send("two")
        assert [info.title for info in store.find()] == ["two", "one"]
    store.close()


async def test_export_and_import(
    store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with driven(ScriptedBackend([Script("**one**"), Script("uno")]), store=store) as driver:
        await driver.send("/export")
        assert "nothing to export" in driver.errors[0]
        await driver.send("A question?")
        await driver.send("/retry")
        for command in (
            "/export",
            "/export md",
            "/export html",
            "/export talk.json",
            "/export json talk.json",
        ):
            count = len(driver.notices)
            await driver.send(command)
            await driver.until(lambda count=count: len(driver.notices) > count)  # type: ignore[misc]
        assert "already exists" in driver.errors[1]
        assert (tmp_path / "a-question.md").read_text() == (tmp_path / "a-question-2.md").read_text()
        assert "uno" in (tmp_path / "a-question.html").read_text()
        assert len(json.loads((tmp_path / "talk.json").read_text())["exchanges"]) == 2
        await driver.send("/reset")
        await driver.send("/import talk.json")
        await driver.until(lambda: driver.answers == ["uno"])
        await driver.pilot.press("alt+left")
        assert driver.answers == ["**one**"]
        assert len(store.find()) == 2
        for command in (
            "/import missing.json",
            "/import a-question.md",
            "/import ~nobody-at-all/x.json",
            "/export .",
        ):
            count = len(driver.errors)
            await driver.send(command)
            await driver.until(lambda count=count: len(driver.errors) > count)  # type: ignore[misc]
        assert driver.answers == ["**one**"]
    store.close()


async def test_a_disk_that_fails_is_said_once_and_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    store = SessionStore.open(tmp_path / "folder.db")
    async with driven(ScriptedBackend([Script("one"), Script("two")]), store=store) as driver:
        remarks = driver.app.chat.query_one(Remarks)
        await driver.until(lambda: remarks.texts)
        await driver.send("a")
        await driver.send("b")
        assert driver.answers == ["one", "two"]
        assert len(remarks.texts) == 1  # it stands for as long as it is true
        assert remarks.display
        assert driver.errors == []
        assert [exchange.text for exchange in store.load(latest(store))[1].exchanges] == ["one", "two"]
    store.close()


async def test_without_a_store_there_is_nothing_to_open() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send("/sessions")
        assert "Conversations are not saved" in driver.errors[0]
        await driver.send("/rename x")
        assert len(driver.errors) == 1
        assert driver.app.chat.conversation.saved.info.title == "x"


async def test_a_session_of_two_thousand_messages_opens_at_once(store: SessionStore) -> None:
    tree = Tree()
    text = "Some **prose** with `code`.\n\n- one\n- two\n\n```python\nx = f(1)\n```\n\n" * 4
    for number in range(1000):
        exchange = tree.add(tree.head, f"Question {number}?", "scripted")
        exchange.text, exchange.finish_reason = f"Answer {number}. {text}", "eos"
    session = store.add(SessionInfo(title="Long", model="scripted"), tree.exchanges, tree.head)
    async with driven(ScriptedBackend(), store=store, session=session, ready=False) as driver:
        await driver.shows("x = f(1)")
        laid_out = sum(entry.height > 0 for entry in driver.transcript.entries)
        assert laid_out < 2000, "everything was laid out before anything was shown"
        await driver.idle()
        await driver.pilot.press("ctrl+home")
        await driver.shows("Question 0?")
    store.close()


async def test_quitting_saves_the_last_words(store: SessionStore) -> None:
    script = Script("one two three four", gate=threading.Event(), gate_after=3)
    async with driven(ScriptedBackend([script]), store=store) as driver:
        await driver.send("count", wait=False)
        await driver.until(lambda: driver.answers == ["one two thre"])
        driver.composer.put("a last thought")
    info, tree, draft = store.load(latest(store))
    assert (info.title, tree.exchanges[0].text, draft) == ("count", "one two thre", "a last thought")
    store.close()
