"""Compaction on the screen: what is chosen, read and edited before it is used; what the model sees then."""

import threading

import pytest

from chatterm.backends.backend import Request
from chatterm.conversation.entries import CompactionEntry
from chatterm.screens.chat import compacting
from chatterm.screens.compact import CompactScreen
from chatterm.settings.settings import ChatSettings, Settings
from engine.errors import ContextFullError
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend

LONG = "many words of an answer " * 20
SUMMARY = "You asked three things and I answered."


def backend(*more: Script) -> ScriptedBackend:
    return ScriptedBackend([Script(LONG)] * 3 + list(more), context_length=600)


async def three(driver: Driver) -> None:
    for text in ("one", "two", "three"):
        await driver.send(text)


def box(driver: Driver) -> CompactScreen:
    screen = driver.app.screen
    assert isinstance(screen, CompactScreen)
    return screen


async def summarised(driver: Driver) -> None:
    await driver.send("/compact", wait=False)
    await driver.shows("Summarise the first")
    await driver.pilot.press("enter")
    await driver.until(lambda: "in place of" in driver.text())


async def test_a_summary_is_read_and_edited_before_the_model_sees_it() -> None:
    scripted = backend(Script(SUMMARY), Script("Fine."))
    async with driven(scripted) as driver:
        await three(driver)
        await summarised(driver)
        request = next(call for name, call in scripted.calls if name == "answer")
        assert isinstance(request, Request)
        assert [m.content for m in request.messages[:-1]] == ["one", LONG, "two", LONG]
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (0, 3)))  # warmed while it is read
        await driver.pilot.press("space", "O", "K")
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        await driver.send("four")
        assert SUMMARY + " OK" in scripted.history[0][0]
        assert [question for question, _ in scripted.history[1:]] == ["three", "four"]
        assert driver.questions == ["one", "two", "three", "four"]
        marks = [entry.shown for entry in driver.transcript.entries if isinstance(entry, CompactionEntry)]
        assert marks == [(SUMMARY + " OK", 2, 0)]


async def test_escape_changes_nothing_and_the_history_comes_back() -> None:
    scripted = backend(Script(SUMMARY))
    async with driven(scripted) as driver:
        await three(driver)
        await summarised(driver)
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (0, 3)))
        await driver.pilot.press("escape")
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (1, 2, 3)))
        assert not any(exchange.compaction for exchange in driver.app.chat.conversation.path)


async def test_an_edit_before_the_point_a_retry_and_undo_see_what_was_said() -> None:
    scripted = backend(Script(SUMMARY), Script("Fine."))
    async with driven(scripted) as driver:
        await three(driver)
        await summarised(driver)
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        talk = driver.app.chat.conversation
        talk.edit(talk.path[0], "another", "scripted")
        await driver.idle()
        assert scripted.history == [("another", "Fine.")]
        await driver.send("/branch prev")
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (0, 3)))
        await driver.send("/undo")
        await driver.send("/undo")
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (1,)))
        await driver.send("/redo")
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (0,)))


async def test_a_summary_that_fails_or_is_stopped_can_be_written_by_hand() -> None:
    gate = threading.Event()
    failing = Script(error=ContextFullError("It is too long", needed=700, available=600))
    scripted = backend(failing, Script(SUMMARY, gate=gate, gate_after=2))
    async with driven(scripted, size=(100, 30)) as driver:
        await three(driver)
        await driver.send("/compact", wait=False)
        await driver.pilot.press("enter")
        await driver.shows("Write a summary")
        await driver.pilot.press("ctrl+r")
        await driver.shows("You aske")
        await driver.pilot.press("enter")
        await driver.shows("was stopped")
        await driver.types("mine")
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert "mine" in str(driver.app.chat.conversation.path[1].compaction)


async def test_a_summary_that_is_no_shorter_is_refused_in_a_line() -> None:
    scripted = ScriptedBackend([Script("a"), Script("b"), Script(SUMMARY)], context_length=600)
    async with driven(scripted, size=(100, 30)) as driver:
        await driver.send("one")
        await driver.send("two")
        await summarised(driver)
        await driver.pilot.press("enter")
        await driver.shows("shorten it")
        await driver.pilot.press("escape")
        assert driver.app.chat.conversation.path[0].compaction is None


async def test_what_is_pinned_stays_and_is_marked() -> None:
    scripted = backend(Script("Fine."))
    async with driven(scripted) as driver:
        await three(driver)
        await driver.send("/pin 1")
        await driver.send("/compact start")
        await driver.pilot.press("ctrl+home")
        assert "◆ pinned" in driver.text()
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (1,)))
        await driver.send("/pin 2")
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (1, 2)))
        await driver.pilot.press("ctrl+end")
        await driver.shows("except for 2 pinned")
        await driver.send("/pin 2")
        await driver.shows("except for 1 pinned")
        await driver.send("/continue")
        assert driver.errors
        await driver.send("/compact off")
        await driver.until(lambda: scripted.calls[-1] == ("load_path", (1, 2, 3)))


async def test_pinned_messages_that_leave_no_room_are_said() -> None:
    scripted = ScriptedBackend([Script(LONG)], context_length=90)
    async with driven(scripted) as driver:
        await driver.send("one")
        await driver.send("/pin")
        await driver.send("/compact", wait=False)
        await driver.until(lambda: driver.errors)
        assert "pinned messages take about" in driver.errors[0]
        assert "\n" not in driver.errors[0]


@pytest.mark.parametrize("when", ["ask", "stop"])
async def test_a_message_that_does_not_fit_asks_what_shall_make_room(when: str) -> None:
    full = Script(error=ContextFullError("It is too long", needed=700, available=600))
    async with driven(ScriptedBackend([Script(LONG), full], context_length=600)) as driver:
        driver.app.chat.settings = Settings(chat=ChatSettings(when))  # type: ignore[arg-type]
        await driver.send("one")
        await driver.send("two")
        await driver.until(lambda: driver.errors)
        assert driver.composer.text == "two"
        assert isinstance(driver.app.screen, CompactScreen) == (when == "ask")


@pytest.mark.parametrize("said", [[], ["one"]])
async def test_a_message_for_which_nothing_makes_room_is_explained_and_nothing_asked(said: list[str]) -> None:
    full = Script(error=ContextFullError("It is too long", needed=900_000, available=600))
    async with driven(ScriptedBackend([Script(LONG)] * len(said) + [full], context_length=600)) as driver:
        for text in said:
            await driver.send(text)
        await driver.send("big")
        await driver.until(lambda: driver.errors)
        await driver.pilot.pause()
        assert [error.split(".")[0] for error in driver.errors] == ["It is too long"]
        assert driver.composer.text == "big"
        assert driver.app.screen is driver.app.chat


async def test_a_summary_is_made_in_idle_time_where_that_is_wanted_and_waits() -> None:
    scripted = ScriptedBackend([Script(LONG), Script(LONG), Script(SUMMARY)], context_length=200)
    async with driven(scripted) as driver:
        driver.app.chat.settings = Settings(chat=ChatSettings("summarise"))
        await driver.send("one")
        await driver.send("two")
        await driver.until(lambda: any("/compact shows it" in text for text in driver.notices))
        assert not any(exchange.compaction for exchange in driver.app.chat.conversation.path)
        await driver.send("/compact", wait=False)
        await driver.shows(SUMMARY)


async def test_a_context_of_unknown_size_is_never_full_and_can_be_compacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compacting, "_PAUSE", 0.0)
    scripted = ScriptedBackend([Script(LONG)] * 3 + [Script(SUMMARY)], context_length=0)
    async with driven(scripted) as driver:
        driver.app.chat.settings = Settings(chat=ChatSettings("summarise"))
        await three(driver)
        await driver.send("/pin 1")
        for now in range(5):
            driver.app.chat.compacting.offer_summary(1e6 + now)
            await driver.pilot.pause()
        assert not any(name == "answer" for name, _ in scripted.calls), "nobody asked for a summary"
        await driver.send("/compact", wait=False)
        await driver.shows("Summarise the first")
        assert "of 0" not in driver.text()
        assert driver.errors == []


async def test_whatever_is_asked_for_ends_a_summary_at_once() -> None:
    gate = threading.Event()
    scripted = backend(Script(SUMMARY, gate=gate), Script("Fine."))
    async with driven(scripted) as driver:
        await three(driver)
        await driver.send("/compact", wait=False)
        await driver.pilot.press("enter")
        await driver.until(lambda: any(name == "answer" for name, _ in scripted.calls))
        await driver.pilot.press("escape")
        await driver.send("four")
        assert driver.answers[-1] == "Fine."
