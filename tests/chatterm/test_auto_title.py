"""The title of a conversation: the first words, then the model's where it makes a good one and nobody has named it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.backends import local
from chatterm.backends.backend import ChatOptions
from chatterm.backends.local import LocalBackend
from chatterm.screens.chat import auto_title
from chatterm.sessions.store import SessionStore
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionStore]:
    monkeypatch.setattr(auto_title, "_PAUSE", 0.0)
    opened = SessionStore.open(tmp_path / "sessions.db")
    yield opened
    opened.close()


def titles(store: SessionStore) -> list[str]:
    return [info.title for info in store.find()]


async def test_the_model_makes_the_title(store: SessionStore) -> None:
    backend = ScriptedBackend([Script("Six minutes.")], title='"Boiling an egg."')
    async with driven(backend, store=store) as driver:
        await driver.send("how long?")
        await driver.until(lambda: driver.app.chat.conversation.title == "Boiling an egg")
        await driver.until(lambda: titles(store) == ["Boiling an egg"])
        assert ("begin_title", ("how long?", "Six minutes.")) in backend.calls
        await driver.send("and hard?")
        assert sum(name == "begin_title" for name, _ in backend.calls) == 1
        await driver.send("/reset")
        assert driver.app.chat.conversation.title == ""


@pytest.mark.parametrize("said", [None, "", "the the the the the"])
async def test_the_first_words_stay_where_it_makes_none(store: SessionStore, said: str | None) -> None:
    backend = ScriptedBackend(title=said)
    async with driven(backend, store=store) as driver:
        await driver.send("how long?")
        await driver.until(lambda: any(name == "begin_title" for name, _ in backend.calls))
        await driver.until(lambda: driver.app.chat.titling._wanted is None)
        assert titles(store) == ["how long?"]


async def test_a_title_that_a_person_gave_is_never_overwritten(store: SessionStore) -> None:
    backend = ScriptedBackend(title="Boiling an egg")
    async with driven(backend, store=store) as driver:
        await driver.send("how long?", wait=False)
        await driver.until(lambda: driver.app.chat.conversation.saved.session)
        await driver.send("/rename Mine")
        await driver.idle()
        await driver.until(lambda: driver.app.chat.titling._wanted is None)
        assert titles(store) == ["Mine"]
    session = store.find()[0].id
    store.retitle(session, "how long?", "Boiling an egg")  # renamed in another process meanwhile
    assert titles(store) == ["Mine"]


async def test_a_title_may_be_given_before_the_first_message(store: SessionStore) -> None:
    async with driven(ScriptedBackend(title="Boiling an egg"), store=store) as driver:
        await driver.send("/rename Mine")
        await driver.send("how long?")
        assert driver.app.chat.titling._wanted is None
        assert titles(store) == ["Mine"]


async def test_the_first_answer_is_undone_while_it_runs(store: SessionStore) -> None:
    gate = threading.Event()
    backend = ScriptedBackend([Script("Six minutes.", gate=gate, gate_after=1)], title="Boiling an egg")
    async with driven(backend, store=store) as driver:
        await driver.send("how long?", wait=False)
        await driver.until(lambda: driver.app.chat.conversation.turn is not None)
        await driver.send("/undo", wait=False)
        gate.set()
        await driver.idle()
        assert driver.app.chat.titling._wanted is None


async def test_nothing_is_asked_while_somebody_types_or_where_it_is_off(store: SessionStore) -> None:
    gate = threading.Event()
    backend = ScriptedBackend([Script(), Script(gate=gate)], title="Boiling an egg")
    async with driven(backend, store=store) as driver:
        driver.app.chat.titling.is_on = False
        await driver.send("how long?")
        assert driver.app.chat.titling._wanted is None
        await driver.send("/reset")
        driver.app.chat.titling.is_on = True
        driver.composer.put("how long, again?")
        await driver.pilot.press("enter")
        driver.composer.put("I go on typing")
        gate.set()
        await driver.until(lambda: driver.app.chat.titling._wanted)
        assert all(name != "begin_title" for name, _ in backend.calls)
        driver.composer.put("")
        await driver.until(lambda: driver.app.chat.conversation.title == "Boiling an egg")


def test_the_engine_makes_one_and_a_message_ends_it(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(
        str(smollm2), ChatOptions(context=1024, sampling={"temperature": 0.0, "max_tokens": 4})
    )
    backend.open()
    list(backend.send("Why is the sky blue?"))
    assert backend.begin_title("Why is the sky blue?", "It scatters.") is False  # too small
    monkeypatch.setattr(local, "_LEAST_FOR_TITLES", 0)
    assert backend.begin_title("Why is the sky blue?", "It scatters.")
    aside = backend._aside
    assert aside is not None
    assert aside._task is not None
    list(backend.send("And at night?"))
    assert aside._task.sequence.cancelled or aside.said is not None
    while backend.made_title() is None:
        assert backend.begin_title("Why is the sky blue?", "It scatters.")
        if aside._task is not None:
            aside._task.sequence.finished.wait(60)
    assert backend.made_title()
    backend.close()
