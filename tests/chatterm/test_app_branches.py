"""Branches on the screen: retry, edit, undo, the alternatives of a message, selected messages."""

import threading
from pathlib import Path

import pytest
from textual import events

from chatterm.backends.backend import EngineError, FinishReason, TurnStats
from chatterm.conversation.entries import AnswerEntry, UserEntry
from chatterm.conversation.figures import decode_rate
from chatterm.sessions.store import SessionStore
from chatterm.terminal.driver import Keyboard
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import PATIENCE


def answering(*texts: str) -> ScriptedBackend:
    return ScriptedBackend([Script(text) for text in texts])


async def press(driver: Driver, *keys: str) -> None:
    await driver.pilot.press(*keys)
    await driver.pilot.pause()


async def test_a_retry_keeps_the_old_answer_as_a_branch() -> None:
    backend = answering("bad", "good")
    async with driven(backend) as driver:
        await driver.send("q")
        assert "/2 >" not in driver.text()
        await press(driver, "ctrl+r")
        await driver.idle()
        assert (driver.questions, driver.answers) == (["q"], ["good"])
        assert "< 2/2 >" in driver.text()
        await press(driver, "alt+left")
        assert driver.answers == ["bad"]
        assert "< 1/2 >" in driver.text()
        await driver.until(lambda: backend.history == [("q", "bad")])
        await driver.send("and now?")
        assert backend.history[0] == ("q", "bad")
        await driver.send("/branch next")
        assert (driver.questions, driver.answers) == (["q"], ["good"])
        await driver.send("/branch next")
        assert driver.answers == ["good"]  # the edge: nothing moves


async def test_going_back_shows_what_came_after() -> None:
    async with driven(answering("a1", "b1", "a2")) as driver:
        await driver.send("a")
        await driver.send("b")
        await press(driver, "alt+up", "alt+up", "alt+up")
        assert isinstance(driver.transcript.selected, AnswerEntry)
        await press(driver, "r")
        await driver.idle()
        assert driver.answers == ["a2"]
        await press(driver, "alt+left")
        assert driver.answers == ["a1", "b1"]


async def test_an_edit_makes_a_branch_and_loses_nothing() -> None:
    backend = answering("one", "two", "uno")
    async with driven(backend) as driver:
        await driver.send("first")
        await driver.send("second")
        driver.composer.put("a draft")
        await driver.pilot.press("alt+up", "alt+up", "alt+up", "up")
        assert isinstance(driver.transcript.selected, UserEntry)
        await press(driver, "e")
        assert driver.composer.text == "first"
        await driver.types("!")
        await driver.pilot.press("enter")
        await driver.idle()
        assert (driver.questions, driver.answers) == (["first!"], ["uno"])
        assert backend.history == [("first!", "uno")]
        assert driver.composer.text == "a draft"
        row = next(y for y, line in enumerate(driver.text().split("\n")) if "< 2/2 >" in line)
        column = driver.text().split("\n")[row].index("<")
        await driver.pilot.click(offset=(column, row))
        await driver.until(lambda: driver.questions == ["first", "second"])
        await driver.until(lambda: backend.history == [("first", "one"), ("second", "two")])
        await driver.pilot.click(offset=(column + 6, row))
        await driver.until(lambda: driver.questions == ["first!"])


async def test_an_edit_can_be_given_up() -> None:
    async with driven(answering("one")) as driver:
        await driver.send("first")
        driver.composer.put("a draft")
        await driver.send("/edit 1", wait=False)
        await driver.until(lambda: driver.composer.text == "first")
        await press(driver, "escape")
        assert driver.composer.text == ""  # the draft was replaced by the command by hand
        driver.composer.put("a draft")
        await press(driver, "alt+e")
        assert driver.composer.text == "first"
        assert "Esc leaves the message unchanged" in driver.text()
        await press(driver, "escape")
        assert driver.composer.text == "a draft"
        assert driver.questions == ["first"]


async def test_a_new_conversation_ends_an_edit() -> None:
    async with driven(answering("one", "two")) as driver:
        await driver.send("first")
        driver.composer.put("a draft")
        await press(driver, "alt+e", "!", "ctrl+n")
        assert driver.composer.text == "a draft"
        assert "Esc leaves the message unchanged" not in driver.text()
        await press(driver, "enter")
        await driver.idle()
        assert (driver.questions, driver.answers) == (["a draft"], ["two"])


async def test_a_key_that_wants_an_argument_keeps_the_draft() -> None:
    async with driven(answering("one")) as driver:
        driver.composer.put("a draft")
        await press(driver, "alt+s")
        assert driver.composer.text == "/system "
        await driver.types("Be terse.")
        await press(driver, "enter")
        assert driver.composer.text == "a draft"
        await driver.until(lambda: driver.app.chat.backend.options.system == "Be terse.")


async def test_an_edit_that_is_refused_leaves_everything() -> None:
    backend = ScriptedBackend([Script("one"), Script(error=EngineError("Too long."))])
    async with driven(backend) as driver:
        await driver.send("first")
        await driver.send("/edit", wait=False)
        await driver.until(lambda: driver.composer.text == "first")
        await driver.types(" more")
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.errors == ["Too long."])
        assert (driver.questions, driver.answers) == (["first"], ["one"])
        assert driver.composer.text == "first more"
        assert "/2 >" not in driver.text()


async def test_undo_keeps_the_branch() -> None:
    async with driven(answering("one", "two", "three")) as driver:
        await driver.send("a")
        await driver.send("b")
        await press(driver, "alt+u")
        assert (driver.questions, driver.composer.text) == (["a"], "b")
        driver.composer.put("")
        await driver.send("c")
        assert driver.questions == ["a", "c"]
        assert "< 2/2 >" in driver.text()
        await press(driver, "alt+left")
        assert driver.questions == ["a", "b"]


async def test_undo_waits_for_the_end_of_an_edit() -> None:
    async with driven(answering("one", "two")) as driver:
        await driver.send("a")
        await driver.send("b")
        await press(driver, "alt+e", "!", "alt+u")
        assert (driver.questions, driver.composer.text) == (["a", "b"], "b!")
        assert driver.errors == ["A message is being edited; Enter sends it anew, Esc leaves it unchanged."]
        await press(driver, "escape", "alt+u")
        assert (driver.questions, driver.composer.text) == (["a"], "b")


async def test_what_was_taken_back_comes_again_message_by_message() -> None:
    backend = answering("one", "two", "three")
    async with driven(backend) as driver:
        for text in ("a", "b", "c"):
            await driver.send(text)
        driver.composer.put("a draft")
        await press(driver, "alt+u", "alt+u", "alt+u")
        assert (driver.questions, driver.composer.text) == ([], "a\nb\nc\na draft")
        await driver.shows("3 messages undone; /redo (Alt+Z) restores one.")
        await press(driver, "alt+z")
        assert (driver.questions, driver.composer.text) == (["a"], "b\nc\na draft")
        await press(driver, "alt+z")
        await driver.shows("1 message undone; /redo (Alt+Z) restores it.")
        await press(driver, "alt+z")
        assert (driver.questions, driver.answers) == (["a", "b", "c"], ["one", "two", "three"])
        assert driver.composer.text == "a draft"
        assert "undone" not in driver.text()
        await driver.until(lambda: backend.history == [("a", "one"), ("b", "two"), ("c", "three")])
        await press(driver, "alt+z")
        assert driver.errors == ["There is nothing to redo; /branch shows other versions of a message."]


async def test_branch_tells_of_what_was_taken_back_and_goes_there() -> None:
    async with driven(answering("one", "two")) as driver:
        await driver.send("a")
        await driver.send("b")
        await press(driver, "alt+u", "alt+u")
        driver.composer.put("")
        await driver.send("/branch")
        assert "2 messages undone; /redo" in driver.notices[-1]
        await press(driver, "alt+right")
        assert driver.questions == ["a", "b"]


async def test_what_was_taken_back_stays_reachable_in_later_sessions(tmp_path: Path) -> None:
    store = SessionStore.open(tmp_path / "sessions.db")
    async with driven(answering("one", "two"), store=store) as driver:
        await driver.send("a")
        await driver.send("b")
        await press(driver, "alt+u", "alt+u")
        session = driver.app.chat.conversation.saved.session
        driver.composer.put("")
    async with driven(answering(), store=store, session=session) as driver:
        await driver.shows("2 messages undone;")
        driver.composer.put("")
        await press(driver, "alt+z", "alt+z")
        assert (driver.questions, driver.answers) == (["a", "b"], ["one", "two"])
    store.close()


async def test_a_new_message_after_undo_leaves_the_old_ones_as_a_branch() -> None:
    async with driven(answering("one", "two", "three")) as driver:
        await driver.send("a")
        await driver.send("b")
        await press(driver, "alt+u", "alt+u")
        driver.composer.put("")
        await driver.send("x")
        assert "undone" not in driver.text()
        assert "< 2/2 >" in driver.text()
        await press(driver, "alt+left")
        assert driver.questions == ["a", "b"]


async def test_going_on_below_something_long_is_in_sight() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    more = Script("three " + "and more words " * 100 + "the end.", gate=threading.Event(), gate_after=20)
    async with driven(ScriptedBackend([script, more])) as driver:
        await driver.send("count", wait=False)
        await driver.until(lambda: driver.answers == ["one two "])
        await press(driver, "escape")
        await driver.idle()
        for number in range(40):
            driver.app.chat.tell(f"notice {number}")
        driver.transcript.edge(-1)
        await driver.send("/continue", wait=False)
        await driver.until(lambda: len(driver.answers[0]) > 80)
        await driver.shows("and more words")
        assert "notice" not in driver.text()
        assert more.gate is not None
        more.gate.set()
        await driver.shows("the end.")


async def test_a_paste_goes_into_the_composer_while_a_message_is_selected() -> None:
    async with driven(answering("one")) as driver:
        await driver.send("a")
        await press(driver, "alt+up")
        driver.app.post_message(events.Paste("pasted"))
        await driver.until(lambda: driver.composer.text == "pasted")
        assert driver.composer.has_focus


@pytest.mark.parametrize("key", ["f3", "alt+e", "alt+up"])
async def test_a_paste_right_behind_escape_goes_where_escape_leads(key: str) -> None:
    async with driven(answering("one")) as driver:
        await driver.send("a")
        await press(driver, key)
        for event in Keyboard().feed("\x1b\x1b[200~pasted\x1b[201~"):
            driver.app.post_message(event)
        await driver.until(lambda: driver.composer.text == "pasted")


async def test_undo_during_an_answer() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    async with driven(ScriptedBackend([script])) as driver:
        await driver.send("a", wait=False)
        await driver.until(lambda: driver.answers == ["one two "])
        await press(driver, "alt+u")
        await driver.until(lambda: driver.composer.text == "a")
        assert driver.questions == []


async def test_branches_wait_for_the_answer() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    async with driven(ScriptedBackend([Script("x"), script])) as driver:
        await driver.send("a")
        await driver.send("b", wait=False)
        await driver.until(lambda: driver.answers[-1:] == ["one two "])
        await press(driver, "alt+left")
        assert driver.errors == ["An answer is running; Esc stops it."]
        await press(driver, "escape")
        await driver.idle()


async def test_a_retry_waits_for_the_answer_as_messages_do() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    async with driven(ScriptedBackend([script, Script("uno"), Script("two"), Script("due")])) as driver:
        await driver.send("a", wait=False)
        await driver.until(lambda: driver.answers == ["one two "])
        await press(driver, "ctrl+r")
        await driver.send("b", wait=False)
        await driver.send("/retry", wait=False)
        assert (driver.questions, driver.errors) == (["a", "/retry", "b", "/retry"], [])
        assert driver.text().count("waits for the answer") == 3
        script.gate.set()  # type: ignore[union-attr]
        await driver.idle()
        assert (driver.questions, driver.answers) == (["a", "b"], ["uno", "due"])
        assert [e.text for e in driver.app.chat.conversation.tree.exchanges] == [
            "one two three",
            "uno",
            "two",
            "due",
        ]


async def test_a_retry_that_waits_is_taken_back_and_may_have_several_answers() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    async with driven(ScriptedBackend([script, *map(Script, "xyz")])) as driver:
        await driver.send("a", wait=False)
        await driver.until(lambda: driver.answers == ["one two "])
        await driver.send("/retry 2", wait=False)
        await driver.send("/retry", wait=False)
        await press(driver, "alt+u")
        assert (driver.questions, driver.composer.text) == (["a", "/retry 2"], "")
        script.gate.set()  # type: ignore[union-attr]
        await driver.until(lambda: len(driver.app.screen_stack) > 2)
        assert len(driver.app.chat.conversation.choice) == 2
        await driver.idle()


async def test_what_the_keys_do_to_an_edited_message_while_an_answer_runs() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    async with driven(ScriptedBackend([Script("x"), script])) as driver:
        await driver.send("a")
        await driver.send("b", wait=False)
        await driver.until(lambda: driver.answers[-1:] == ["one two "])
        await press(driver, "alt+e")
        await driver.shows("Esc stops the answer; then Enter sends this as a new branch")
        await press(driver, "escape")
        await driver.idle()
        await driver.shows("Enter sends this as a new branch; Esc leaves the message unchanged")
        assert driver.composer.text == "b"


async def test_a_stopped_answer_goes_on_from_there() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    backend = ScriptedBackend([script, Script("three four")])
    async with driven(backend) as driver:
        await driver.send("count", wait=False)
        await driver.until(lambda: driver.answers == ["one two "])
        await press(driver, "escape")
        await driver.idle()
        await press(driver, "alt+g")
        await driver.idle()
        assert driver.answers == ["one two three four"]
        assert ("resume", None) in backend.calls
        exchange = driver.app.chat.conversation.path[0]
        assert (exchange.text, exchange.finish_reason) == ("one two three four", "eos")
        assert exchange.stats["generated_tokens"] == 5
        assert exchange.stats["prompt_tokens"] == 10
        assert "5 tokens · " in driver.text()
        await driver.send("/continue")
        assert "The answer is complete" in driver.errors[-1]


async def test_one_key_ends_the_thinking() -> None:
    thought = "So many thoughts. " * 4
    script = Script("At last.", reasoning=thought, gate=threading.Event(), gate_after=3)
    async with driven(ScriptedBackend([script], thinks=True)) as driver:
        await driver.send("q", wait=False)
        await driver.shows("▾ thinking")
        await press(driver, "alt+a")
        await driver.idle()
        assert driver.answers == ["At last."]
        assert len(driver.app.chat.conversation.path[0].reasoning) < len(thought)
        await press(driver, "alt+a")
        assert driver.errors == ["The model is not thinking."]


async def test_an_answer_that_was_cut_off_can_go_on() -> None:
    backend = ScriptedBackend(
        [Script("to the limit", finish_reason=FinishReason.LENGTH), Script(" and beyond")]
    )
    async with driven(backend) as driver:
        await driver.send("q")
        assert "cut off" in driver.text()
        await driver.send("/continue")
        assert driver.answers == ["to the limit and beyond"]
        assert "cut off" not in driver.text()


async def test_selecting_with_keys_and_mouse() -> None:
    async with driven(answering("one")) as driver:
        await driver.send("first")
        await press(driver, "alt+up")
        assert driver.app.focused is driver.transcript
        assert "c copy · e edit · r retry" in driver.text()
        await press(driver, "down")
        assert driver.transcript.selected is None
        assert driver.app.focused is driver.composer
        row = next(y for y, line in enumerate(driver.text().split("\n")) if "first" in line)
        await driver.pilot.click(offset=(8, row))
        await driver.until(lambda: isinstance(driver.transcript.selected, UserEntry))
        await press(driver, "escape")
        assert driver.transcript.selected is None
        await press(driver, "alt+up", "h", "i")
        assert driver.composer.text == "hi"  # a key that means nothing there is written


async def test_a_message_that_waits_for_another_model_has_the_history() -> None:
    gate = threading.Event()
    backend = ScriptedBackend(
        [Script("one"), Script("two")], on_switch=lambda _: gate.wait(PATIENCE) and None
    )
    async with driven(backend) as driver:
        await driver.send("a")
        await driver.send("/model other", wait=False)
        await driver.send("b", wait=False)
        await driver.shows("waits for the model")
        gate.set()
        await driver.idle()
        await driver.shows("Now chatting with other")
        assert backend.history == [("a", "one"), ("b", "two")]
        await driver.send("c")
        assert backend.history == [("a", "one"), ("b", "two"), ("c", "two")]


async def test_what_is_written_anew_is_warmed_where_it_will_stand() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        for text in ("one", "two", "three"):
            await driver.send(text)
        backend.calls.clear()
        await driver.send("/edit 2", wait=False)
        await driver.types("!")
        await driver.until(lambda: ("prepare", "two!") in backend.calls)
        assert ("load_path", (1,)) in backend.calls
        backend.calls.clear()
        await driver.pilot.press("escape")
        await driver.until(lambda: ("load_path", (1, 2, 3)) in backend.calls)


async def test_the_figures_are_those_of_the_branch_that_is_looked_at() -> None:
    """Whatever way leads to a branch, the line below shows the speed that its own last answer had."""
    backend = ScriptedBackend([Script("a" * 8, prompt=11), Script("b" * 80, prompt=22)])
    async with driven(backend) as driver:
        chat = driver.app.chat

        def shown() -> tuple[int, float, int]:
            live = chat._show_live(0.0)
            return live.generated, live.speed, (live.cached or 0) + (live.computed or 0)

        def saved() -> tuple[int, float, int]:
            stats = TurnStats.of(chat.conversation.path[-1].stats)
            return stats.generated_tokens, decode_rate(stats), stats.prompt_tokens

        await driver.send("q")
        await driver.send("/retry")
        second = shown()
        assert second == saved()
        await driver.send("/branch prev")
        assert shown() == saved() != second
        await driver.send("/branch next")
        assert shown() == saved() == second
        await driver.send("/undo")
        assert shown() == (0, 0.0, 0)
        chat.composer.clear()
        await driver.send("/reset")
        assert shown() == (0, 0.0, 0)


async def test_the_message_that_is_edited_is_marked() -> None:
    mark = "you are editing this message"
    async with driven(answering("one", "two", "three")) as driver:
        await driver.send("first")
        await driver.send("second")
        await driver.send("/edit 1")
        first, second = (e for e in driver.transcript.entries if isinstance(e, UserEntry))
        assert mark in driver.text()
        assert (first.is_edited, second.is_edited) == (True, False)
        await driver.send("/edit 2")
        assert (first.is_edited, second.is_edited) == (False, True)
        await press(driver, "escape")
        assert (first.is_edited, second.is_edited) == (False, False)
        assert mark not in driver.text()
        await driver.send("/edit 2")
        await driver.send("second, better")
        assert not any(e.is_edited for e in driver.transcript.entries if isinstance(e, UserEntry))


async def test_a_stopped_answer_says_how_to_go_on() -> None:
    gate = threading.Event()
    async with driven(ScriptedBackend([Script("one two three", gate=gate, gate_after=1)])) as driver:
        await driver.send("q", wait=False)
        await driver.until(lambda: driver.answers == ["one "])
        await press(driver, "escape")
        await driver.idle()
        await driver.shows("stopped; /continue resumes it")
