"""The chat on the screen: sending, streaming, stopping, commands, what bad luck does."""

import re
import threading
from functools import partial

import pytest

from chatterm.backends.backend import EngineError, FinishReason, ModelError, Progress
from chatterm.screens.chat.base import check_model
from chatterm.screens.report import ReportScreen
from chatterm.terminal.error_log import log_path
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend


def gated(text: str = "one two three four", after: int = 2, **more: object) -> tuple[ScriptedBackend, Script]:
    """A backend whose first answer halts after some tokens until its gate is set."""
    script = Script(text, gate=threading.Event(), gate_after=after, **more)  # type: ignore[arg-type]
    return ScriptedBackend([script, Script("second")]), script


def gate(script: Script) -> threading.Event:
    assert script.gate is not None
    return script.gate


# --- asking and answering ---


async def test_a_question_and_its_answer() -> None:
    backend = ScriptedBackend([Script("It is **Paris**.", cached=7, prompt=10)])
    async with driven(backend) as driver:
        await driver.types("Capital?")
        await driver.pilot.press("enter")
        await driver.idle()
        assert [call for call in backend.calls if call[0] != "prepare"][1] == ("send", "Capital?")
        assert driver.composer.text == ""
        text = driver.text()
        assert "▌ Capital?" in text
        assert "It is Paris." in text
        assert "4 tokens · " in text
        assert "first token after 0.12 s" in text
        assert "7 cached, 3 computed" in text
        assert ("settle", None) in backend.calls


async def test_the_answer_shows_while_it_comes() -> None:
    backend, script = gated("half and half")
    async with driven(backend) as driver:
        await driver.send("go", wait=False)
        await driver.shows("half and")
        assert "half and half" not in driver.text()
        gate(script).set()
        await driver.shows("half and half")


async def test_typing_while_the_model_loads_and_a_message_that_waits() -> None:
    progress = Progress("load", "weights", 61_000_000, 98_000_000)
    backend = ScriptedBackend(load_gate=threading.Event(), load_progress=(progress,))
    async with driven(backend, ready=False) as driver:
        await driver.shows("load weights 61 of 98 MB")
        await driver.types("first")
        assert driver.composer.text == "first"
        await driver.pilot.press("enter")
        await driver.shows("waits for the model")
        assert ("send", "first") not in backend.calls
        assert backend.load_gate is not None
        backend.load_gate.set()
        await driver.shows("Hello there.")
        assert "waits" not in driver.text()
        assert driver.questions == ["first"]


async def test_a_waiting_message_can_be_taken_back() -> None:
    backend = ScriptedBackend(load_gate=threading.Event())
    async with driven(backend, ready=False) as driver:
        await driver.send("too early", wait=False)
        await driver.pilot.press("escape")
        assert driver.composer.text == "too early"
        assert driver.questions == []


async def test_messages_sent_during_an_answer_go_one_after_the_other() -> None:
    backend, script = gated()
    async with driven(backend) as driver:
        await driver.send("a", wait=False)
        await driver.until(lambda: driver.answers == ["one two "])
        await driver.send("b", wait=False)
        await driver.send("c", wait=False)
        await driver.shows("waits for the answer")
        gate(script).set()
        await driver.idle()
        assert [call for call in backend.calls if call[0] == "send"] == [("send", x) for x in "abc"]
        kinds = [type(entry).__name__ for entry in driver.transcript.entries]
        assert kinds == ["UserEntry", "AnswerEntry"] * 3


async def test_nothing_is_sent_for_nothing() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.send("  \n ")
        assert "send" not in [name for name, _ in backend.calls]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FinishReason.LENGTH, "cut off at the token limit"),
        (FinishReason.CONTEXT_FULL, "the context is full; /compact makes room"),
        (FinishReason.REPETITION, "stopped, the answer was repeating itself"),
        (FinishReason.CANCELLED, "stopped"),
    ],
)
async def test_a_finish_reason_that_matters_is_said(reason: FinishReason, said: str) -> None:
    async with driven(ScriptedBackend([Script("x", finish_reason=reason)]), size=(120, 24)) as driver:
        await driver.send("q")
        assert said in driver.text()


async def test_an_ordinary_end_is_not_mentioned() -> None:
    async with driven(ScriptedBackend([Script("fine")])) as driver:
        await driver.send("q")
        assert not [word for word in ("eos", "stop", "limit") if word in driver.text().lower()]


# --- stopping and leaving ---


async def test_escape_stops_and_keeps_what_was_said() -> None:
    backend, _ = gated("one two three four")
    async with driven(backend) as driver:
        await driver.send("count", wait=False)
        await driver.shows("one two")
        await driver.pilot.press("escape")
        await driver.idle()
        assert driver.answers == ["one two "]
        assert "stopped" in driver.text()
        assert backend.history == [("count", "one two ")]
        await driver.send("next")
        assert driver.answers[-1] == "second"


async def test_a_stop_before_the_first_token_is_not_lost() -> None:
    backend, _ = gated(after=0)
    async with driven(backend) as driver:
        await driver.send("q", wait=False)
        await driver.pilot.press("escape")
        await driver.idle()
        assert "stopped" in driver.text()
        assert driver.answers == [""]


async def test_control_c_stops_first_and_quits_the_second_time() -> None:
    backend, _ = gated()
    async with driven(backend) as driver:
        await driver.send("q", wait=False)
        await driver.shows("one two")
        await driver.pilot.press("ctrl+c")
        await driver.shows("Ctrl+C again quits")
        await driver.idle()
        assert driver.app.return_value is None
        assert backend.history == [("q", "one two ")]
        await driver.pilot.press("ctrl+c")
        await driver.until(lambda: driver.app.return_value == 0)
    assert backend.closed


async def test_control_c_stops_one_answer_after_the_other_while_messages_wait() -> None:
    scripts = [Script(f"one two {n}", gate=threading.Event(), gate_after=2) for n in range(3)]
    async with driven(ScriptedBackend(scripts)) as driver:
        for text in ("a", "b", "c"):
            await driver.send(text, wait=False)
        for number in range(3):
            await driver.until(lambda count=number: driver.answers == ["one two "] * (count + 1))
            assert "Ctrl+C again quits" not in driver.text()
            await driver.pilot.press("ctrl+c")
            assert driver.app.return_value is None
        await driver.idle()
        assert driver.questions == ["a", "b", "c"]
        await driver.shows("Ctrl+C again quits")
        await driver.pilot.press("ctrl+c")
        await driver.until(lambda: driver.app.return_value == 0)


async def test_an_answer_that_starts_disarms_the_quit() -> None:
    script = Script("one two three", gate=threading.Event(), gate_after=2)
    async with driven(ScriptedBackend([script, Script("short")])) as driver:
        for answers in (["one two "], ["one two ", "short"]):
            await driver.pilot.press("ctrl+c")
            await driver.shows("Ctrl+C again quits")
            await driver.send("q", wait=False)
            await driver.until(lambda expected=answers: driver.answers == expected)
            await driver.pilot.press("ctrl+c")
            await driver.idle()
            assert driver.app.return_value is None
            driver.app.chat.interrupt._armed_at -= 60  # a minute passes


async def test_control_c_while_loading_takes_the_message_back() -> None:
    backend = ScriptedBackend(load_gate=threading.Event())
    async with driven(backend, ready=False) as driver:
        await driver.send("first", wait=False)
        await driver.until(lambda: driver.app.chat.conversation.waiting)
        await driver.pilot.press("ctrl+c")
        assert driver.composer.text == "first"
        assert driver.app.return_value is None
        assert backend.load_gate is not None
        backend.load_gate.set()
        await driver.idle()
        assert "send" not in [name for name, _ in backend.calls]


async def test_control_c_alone_does_not_quit() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.pilot.press("ctrl+c")
        await driver.shows("Ctrl+C again quits")
        driver.app.chat.interrupt._armed_at -= 60  # a minute passes
        await driver.pilot.press("ctrl+c")
        assert driver.app.return_value is None


async def test_control_c_clears_a_draft_which_comes_back() -> None:
    async with driven(ScriptedBackend()) as driver:
        driver.composer.put("one\n\ntwo")
        await driver.pilot.press("ctrl+c")
        assert driver.composer.text == ""
        await driver.shows("Draft cleared; Ctrl+Z brings it back")
        await driver.pilot.press("ctrl+z")
        assert driver.composer.text == "one\n\ntwo"
        driver.app.chat.interrupt._armed_at -= 60  # a minute passes
        await driver.pilot.press("ctrl+c")
        assert (driver.composer.text, driver.app.return_value) == ("", None)
        await driver.pilot.press("ctrl+c")
        await driver.until(lambda: driver.app.return_value == 0)
        assert driver.composer.text == "one\n\ntwo", "whoever quits finds it again"


async def test_quit_ends_with_0_also_while_the_model_loads() -> None:
    progress = Progress("load", "weights", 1, 2)
    backend = ScriptedBackend(load_gate=threading.Event(), load_progress=(progress,))
    async with driven(backend, ready=False) as driver:
        await driver.send("/quit", wait=False)
        await driver.until(lambda: driver.app.return_value == 0)
        assert driver.app.worker.close(), "the load goes on after the person has left"


# --- thinking ---


async def test_thinking_is_live_then_one_line_then_opens() -> None:
    script = Script("The answer.", reasoning="Let me think about it.", gate=threading.Event(), gate_after=3)
    async with driven(ScriptedBackend([script], thinks=True)) as driver:
        await driver.send("q", wait=False)
        await driver.shows("▾ thinking · ")
        await driver.shows("│ Let me think")
        gate(script).set()
        await driver.idle()
        text = driver.text()
        assert "▸ thought for " in text
        assert "6 tokens" in text
        assert "Let me think" not in text
        assert "The answer." in text
        await driver.pilot.press("ctrl+t")
        await driver.shows("│ Let me think about it.")
        await driver.pilot.press("ctrl+t")
        await driver.until(lambda: "Let me think" not in driver.text())
        row = next(y for y, line in enumerate(driver.text().split("\n")) if "▸ thought" in line)
        await driver.pilot.click(offset=(8, row))
        await driver.shows("│ Let me think about it.")


async def test_think_show_and_hide() -> None:
    backend = ScriptedBackend([Script("Yes.", reasoning="Hidden depth.")], thinks=True)
    async with driven(backend) as driver:
        await driver.send("/think show")
        await driver.send("q")
        assert "Hidden depth." in driver.text()
        await driver.send("/think hide")
        await driver.until(lambda: "Hidden depth." not in driver.text())
        assert "thought for" in driver.text()


async def test_think_on_and_off_reach_the_model() -> None:
    backend = ScriptedBackend(thinks=True)
    async with driven(backend) as driver:
        await driver.send("/think off")
        await driver.until(lambda: backend.think == "off")
        await driver.shows("answers without thinking")
        await driver.send("/think")
        assert "answers without thinking" in driver.notices[-1]


async def test_a_model_that_does_not_think_says_so() -> None:
    async with driven(ScriptedBackend(thinks=False)) as driver:
        await driver.send("/think on")
        assert driver.errors == ["scripted cannot think; use /model to choose one that can."]
        await driver.send("/think auto")
        await driver.send("/think")
        assert driver.notices[-1] == "scripted cannot think; it answers directly."
        assert ("set_think", "on") not in driver.app.chat.backend.calls  # type: ignore[attr-defined]


# --- commands ---


async def test_reset_forgets_everything() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.send("q")
        await driver.send("/reset")
        await driver.until(lambda: ("reset", None) in backend.calls)
        assert driver.questions == []
        assert driver.answers == []
        assert driver.app.chat.conversation.path == []
        await driver.send("/stats")
        await driver.until(lambda: re.search(r"answers +– +0 +1\n", driver.text()))


async def test_reset_during_an_answer() -> None:
    backend, _ = gated()
    async with driven(backend) as driver:
        await driver.send("q", wait=False)
        await driver.shows("one two")
        await driver.send("/reset", wait=False)
        await driver.shows("Stop the answer and begin a new conversation?")
        await driver.pilot.press("n")
        assert driver.answers == ["one two "]
        await driver.send("/reset", wait=False)
        await driver.pilot.press("y")
        await driver.until(lambda: ("reset", None) in backend.calls)
        assert driver.answers == []
        await driver.send("again")
        assert driver.answers == ["second"]
        assert backend.history == [("again", "second")]


async def test_undo_takes_the_last_exchange_back_into_the_composer() -> None:
    backend = ScriptedBackend([Script("one"), Script("two")])
    async with driven(backend) as driver:
        await driver.send("a")
        await driver.send("b")
        await driver.send("/undo")
        await driver.until(lambda: driver.composer.text == "b")
        assert (driver.questions, driver.answers) == (["a"], ["one"])
        assert backend.history == [("a", "one")]
        driver.composer.put("")
        await driver.send("/undo")
        await driver.until(lambda: driver.questions == [])
        driver.composer.put("")
        await driver.send("/undo")
        await driver.shows("nothing to undo")


async def test_retry_replaces_the_answer() -> None:
    async with driven(ScriptedBackend([Script("bad"), Script("good")])) as driver:
        await driver.send("q")
        await driver.send("/retry")
        await driver.until(lambda: driver.answers == ["good"])
        assert driver.questions == ["q"]


async def test_a_retry_that_fails_leaves_the_answer() -> None:
    backend = ScriptedBackend([Script("kept"), Script(error=EngineError("No."))])
    async with driven(backend) as driver:
        await driver.send("q")
        await driver.send("/retry")
        await driver.until(lambda: driver.errors == ["No."])
        assert (driver.questions, driver.answers) == (["q"], ["kept"])


async def test_retry_without_a_message() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send("/retry")
        await driver.shows("no answer to generate again")


async def test_system_prompt() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.send("/system")
        await driver.shows("There is no system prompt")
        await driver.send("/system Be terse.")
        await driver.until(lambda: backend.system == "Be terse.")
        await driver.send("/system")
        await driver.until(lambda: isinstance(driver.app.screen, ReportScreen))
        await driver.shows("Be terse.")
        await driver.pilot.press("escape")
        await driver.send("/system none")
        await driver.until(lambda: backend.system is None)


async def test_a_model_is_picked_and_the_history_stays() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.send("q")
        await driver.send("/model")
        await driver.shows("Search, or type a Hub id")
        await driver.types("other")
        await driver.pilot.press("enter")
        await driver.shows("Now chatting with other. The history is kept")
        after = backend.calls[backend.calls.index(("switch", "other")) :]
        assert ("load_path", (1,)) in after
        assert backend.history == [("q", "Hello there.")]
        assert driver.questions == ["q"]


async def test_a_switch_that_fails_keeps_the_model() -> None:
    def refuse(name: str) -> None:
        raise ModelError(f"There is no model {name!r}.")

    backend = ScriptedBackend(on_switch=refuse)
    async with driven(backend) as driver:
        await driver.send("/model nonsense")
        await driver.until(lambda: driver.errors == ["There is no model 'nonsense'."])
        await driver.send("still there?")
        assert driver.answers == ["Hello there."]


async def test_a_mistyped_model_does_not_stop_the_answer() -> None:
    gate = threading.Event()
    backend = ScriptedBackend([Script("A whole answer.", gate=gate, gate_after=1), Script()])
    async with driven(backend) as driver:
        driver.app.chat.check_model = partial(check_model, {})
        await driver.send("q", wait=False)
        await driver.until(lambda: driver.answers == ["A wh"])
        await driver.send("/model smolm2", wait=False)
        await driver.until(lambda: driver.errors)
        gate.set()
        await driver.idle()
        assert driver.errors[0].startswith("Unknown model smolm2. Did you mean smollm2")
        assert driver.answers == ["A whole answer."]
        assert not any(name == "switch" for name, _ in backend.calls)
        gate.clear()
        backend.scripts[1:] = [Script("Another answer.", gate=gate, gate_after=1)]
        await driver.send("q", wait=False)
        await driver.until(lambda: driver.answers[1:] == ["Anot"])
        for no in ("n", "escape"):
            await driver.send("/model smollm2", wait=False)
            await driver.shows("Stop the answer and switch to smollm2? It is not saved.")
            await driver.pilot.press(no)
            assert driver.app.chat.conversation.is_answering
        assert not any(name == "switch" for name, _ in backend.calls)
        await driver.send("and wait", wait=False)
        await driver.send("/model smollm2", wait=False)
        await driver.shows("Stop the answer and switch to smollm2?")
        await driver.pilot.press("y")
        await driver.shows("Now chatting with smollm2")
        assert driver.answers[1] == "Anot"
        assert driver.questions[2] == "and wait"


async def test_a_name_that_only_the_server_knows_is_taken_during_an_answer_too() -> None:
    backend = ScriptedBackend(
        [Script("A whole answer.", gate=threading.Event(), gate_after=1)], loaded_elsewhere=("theirs",)
    )
    async with driven(backend) as driver:
        driver.app.chat.check_model = partial(check_model, {})
        await driver.send("q", wait=False)
        await driver.until(lambda: driver.answers == ["A wh"])
        await driver.send("/model theirs", wait=False)
        await driver.shows("Stop the answer and switch to theirs?")
        await driver.pilot.press("y")
        await driver.shows("Now chatting with theirs")
        assert driver.errors == []


async def test_the_model_that_is_loaded_is_not_loaded_again_unless_something_failed() -> None:
    failing = Script(error=EngineError("Load the model again."))
    backend = ScriptedBackend([Script(), failing, Script()])
    async with driven(backend) as driver:
        await driver.send("/model scripted")
        await driver.shows("scripted is loaded already.")
        await driver.send("q")
        await driver.send("/model", wait=False)
        await driver.shows("● scripted")
        await driver.pilot.press("enter")
        await driver.idle()
        assert ("switch", "scripted") not in backend.calls
        await driver.send("fails")
        await driver.send("/model scripted")
        await driver.shows("Now chatting with scripted")


async def test_stats_and_help() -> None:
    backend = ScriptedBackend([Script("a b c d", cached=30, prompt=42), Script("e", cached=50, prompt=60)])
    async with driven(backend, size=(100, 64)) as driver:
        await driver.send("1")
        await driver.send("2")
        await driver.send("/stats")
        rows = [line.split() for line in driver.text().split("\n")]
        assert ["prompt", "tokens", "60", "102"] in rows
        assert ["from", "cache", "50", "80"] in rows
        assert ["computed", "10", "22"] in rows
        assert ["generated", "tokens", "1", "3"] in rows
        await driver.pilot.press("f1")
        await driver.shows("New line")
        assert "/think [on|off|auto|show|hide]" in driver.text()


async def test_an_unknown_command_loses_nothing() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.send("/frobnicate now")
        assert len(driver.errors) == 1
        assert "Unknown command /frobnicate" in driver.errors[0]
        assert driver.composer.text == "/frobnicate now"
        await driver.pilot.press("home", "space", "enter")
        await driver.idle()
        assert driver.questions == [" /frobnicate now"]


async def test_theme_changes_live() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send("/theme paper")
        assert driver.app.theme == "paper"
        await driver.send("/theme nonsense")
        assert "Unknown theme 'nonsense'" in driver.errors[-1]


# --- what goes wrong ---


@pytest.mark.parametrize("error", [EngineError("Too long by 12 tokens; use /reset."), ModelError("Broken.")])
async def test_an_error_before_the_answer_gives_the_text_back(error: Exception) -> None:
    backend = ScriptedBackend([Script(error=error), Script("fine")])
    async with driven(backend) as driver:
        await driver.send("a long message")
        assert driver.errors == [str(error)]
        assert driver.composer.text == "a long message"
        assert (driver.questions, driver.answers) == ([], [])
        await driver.pilot.press("enter")
        await driver.idle()
        assert driver.answers == ["fine"]


async def test_text_given_back_does_not_overwrite_what_is_being_written() -> None:
    backend = ScriptedBackend([Script(error=EngineError("No."))], load_gate=threading.Event())
    async with driven(backend, ready=False) as driver:
        await driver.send("first", wait=False)
        driver.composer.put("second")
        assert backend.load_gate is not None
        backend.load_gate.set()
        await driver.until(lambda: driver.errors)
        assert driver.composer.text == "first\nsecond"


async def test_an_unexpected_error_in_the_middle_is_one_line_and_the_chat_lives() -> None:
    backend = ScriptedBackend(
        [Script("one two three", error=RuntimeError("a\nb"), error_after=2), Script("ok")]
    )
    async with driven(backend) as driver:
        await driver.send("q")
        where = f" Details are in {log_path()}."
        assert driver.errors == [f"An unexpected error: RuntimeError: a b. The chat continues.{where}"]
        assert driver.answers == ["one two "]
        await driver.send("again")
        assert driver.answers[-1] == "ok"


async def test_a_model_that_cannot_be_loaded() -> None:
    backend = ScriptedBackend(load_error=ModelError("There is no such file."), load_gate=threading.Event())
    async with driven(backend, ready=False) as driver:
        await driver.send("waiting", wait=False)
        assert backend.load_gate is not None
        backend.load_gate.set()
        await driver.until(lambda: driver.errors)
        assert driver.errors[0].startswith("There is no such file. /model loads")
        assert driver.composer.text == "waiting"
        await driver.send("waiting")
        assert "No model is loaded" in driver.errors[-1]
        assert driver.composer.text == "waiting"
        await driver.send("/model other")
        await driver.send("hello")
        assert driver.answers == ["Hello there."]


async def test_an_empty_answer_is_said() -> None:
    async with driven(ScriptedBackend([Script("")])) as driver:
        await driver.send("q")
        assert "The model gave no text." in driver.text()


# --- the figures ---


async def test_narrow_folds_the_figures_to_one_line_and_wide_opens_the_panel() -> None:
    backend = ScriptedBackend([Script("word " * 50, cached=5, prompt=12, tokens_per_s=200)])
    async with driven(backend) as driver:
        await driver.send("q")
        last = driver.text().rstrip().split("\n")[-1]
        assert "tok/s" in last
        assert "/4.1k" in last
        assert "memory" not in driver.text()
        await driver.pilot.resize_terminal(140, 40)
        await driver.shows("memory")
        text = driver.text()
        for word in ("speed", "average", "first token", "cached", "computed", "context", "weights", "98 MB"):
            assert word in text
        assert set("▁▂▃▄▅▆▇█") & set(text)
        await driver.pilot.resize_terminal(80, 24)
        await driver.until(lambda: "memory" not in driver.text())


async def test_a_panel_that_a_narrow_terminal_cannot_show_is_taken_back_with_the_same_key() -> None:
    async with driven(ScriptedBackend(), (60, 20)) as driver:
        screen = driver.app.chat
        await driver.pilot.press("f4")
        await driver.shows("The stats panel needs 70 columns")
        screen.hint_until = 0.0
        await driver.pilot.resize_terminal(62, 20)
        await driver.until(lambda: screen.size.width == 62)
        assert not screen.hint_until, "it is said once"
        await driver.pilot.resize_terminal(90, 20)
        await driver.until(lambda: screen.panel.display)
        await driver.pilot.resize_terminal(60, 20)
        await driver.until(lambda: not screen.panel.display)
        await driver.pilot.press("f4")
        await driver.shows("The stats panel stays closed.")
        await driver.pilot.resize_terminal(140, 20)
        await driver.until(lambda: screen.size.width == 140)
        assert not screen.panel.display
        await driver.pilot.press("f4")
        assert screen.panel.display


@pytest.mark.parametrize("size", [(200, 60), (80, 24), (40, 12), (20, 6), (3, 2)])
async def test_any_size_works(size: tuple[int, int]) -> None:
    async with driven(
        ScriptedBackend([Script("# Hi\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n- x")]), size
    ) as driver:
        await driver.send("a question that is longer than a narrow screen")
        await driver.send("/stats")
        await driver.send("/help")
        assert len(driver.answers) == 1


async def test_a_draft_is_warmed_while_one_thinks() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.types("What")
        await driver.until(lambda: ("prepare", "What") in backend.calls)


async def prepared(driver: Driver, backend: ScriptedBackend) -> list[str]:
    await driver.pilot.pause()
    return [str(value) for name, value in backend.calls if name == "prepare"]


async def test_a_command_is_not_warmed() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.types("/sta")
        assert driver.app.chat.preparation._count_at is driver.app.chat.preparation._warm_at is None
        assert await prepared(driver, backend) == []


async def test_a_load_can_be_stopped_and_begun_again() -> None:
    progress = Progress("download", "weights", 1, 2)
    backend = ScriptedBackend(load_gate=threading.Event(), load_progress=(progress,))
    async with driven(backend, ready=False) as driver:
        await driver.shows("download")
        await driver.pilot.press("escape")
        await driver.shows("The model is still loading; /stop cancels it.")
        await driver.send("/stop", wait=False)
        await driver.until(lambda: driver.errors)
        assert driver.errors[0].startswith("Loading was stopped; what was downloaded is kept. /model")
        assert backend.load_gate is not None
        backend.load_gate.set()
        await driver.send("/model other")
        await driver.send("hello")
        assert driver.answers == ["Hello there."]
