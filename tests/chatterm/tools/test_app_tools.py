"""Tools in the application: a model that asks for things, and a person who is in charge."""

import json
from pathlib import Path
from typing import Any

import pytest
from textual import events

from chatterm.backends.backend import FinishReason, ToolCall, ToolResult
from chatterm.conversation.tool_entry import ToolsEntry
from chatterm.screens import approval
from chatterm.screens.approval import ApprovalScreen
from chatterm.sessions.store import SessionStore
from chatterm.tools.keypress_guard import FAST, QUIET
from tests.chatterm.approving import asked
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.txt").write_text("the notes\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("CHATTERM_CONFIG", str(tmp_path / "config" / "config.toml"))
    return work


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


def backend(*calls: ToolCall, more: tuple[Script, ...] = ()) -> ScriptedBackend:
    return ScriptedBackend([Script("Let me see.", calls=calls), *more, Script("Done.")])


def results(backend: ScriptedBackend) -> list[ToolResult]:
    return [result for name, told in backend.calls if name == "tell" for result in told]  # type: ignore[attr-defined]


async def test_a_call_is_asked_for_done_and_told(folder: Path) -> None:
    model = backend(call("read_file", path="notes.txt"))
    async with driven(model) as driver:
        await driver.send("/tools read")
        await driver.send("What do the notes say?", wait=False)
        clock = await asked(driver)
        assert "read_file" in driver.text()
        assert "path: notes.txt" in driver.text()
        await clock.press("down")
        await clock.press("enter")
        await driver.idle()
        assert [(r.name, r.text, r.state) for r in results(model)] == [("read_file", "the notes", "done")]
        assert driver.answers == ["Let me see.", "Done."]
        assert "▸ read_file  notes.txt  done" in driver.text()


async def test_what_stands_folded_last_opens_and_the_keys_are_those_of_what_is_selected(folder: Path) -> None:
    model = ScriptedBackend(
        [Script("", calls=(call("read_file", path="../x"),)), Script("```sh\nls\n```"), Script("Plain.")]
    )
    async with driven(model, (100, 30)) as driver:
        await driver.send("/tools read")
        await driver.send("Go.")
        message, gap, first = driver.text().split("read_file")[0].split("\n")[-3:]
        assert "Go." in message, "one empty line between a message and a call"
        assert (gap.strip(), first.strip()) == ("", "▸")
        await driver.pilot.press("ctrl+t")
        await driver.shows("The path goes up")
        await driver.pilot.press("ctrl+t", "alt+up")
        assert "The path goes up" not in driver.text()
        await driver.shows("y code · s save · x run · Esc back")
        assert "branch" not in driver.text()
        await driver.pilot.press("up")
        await driver.shows("t results · c copy · r retry · Esc back")
        await driver.pilot.press("up")
        await driver.shows("c copy · e edit · r retry · Esc back")
        assert driver.transcript.selected is driver.transcript.entries[0]
        await driver.pilot.press("escape")
        await driver.send("More")
        await driver.pilot.press("alt+up")
        await driver.shows("c copy · e edit · r retry · Esc back")


async def test_results_are_not_compared_as_if_the_person_had_written_them(folder: Path) -> None:
    model = backend(call("read_file", path="../x"))
    async with driven(model, (100, 30)) as driver:
        await driver.send("/tools read")
        await driver.send("Go.")
        await driver.send("/compare other")
        assert driver.errors == [
            "Results of tools are answered by one model at a time; /model chooses another one."
        ]
        assert len(driver.app.chat.conversation.tree) == 2


async def test_no_is_what_enter_says_and_the_model_is_told_so() -> None:
    model = backend(call("read_file", path="notes.txt"))
    async with driven(model) as driver:
        await driver.send("/tools read")
        await driver.send("Read.", wait=False)
        await (await asked(driver)).press("enter")
        await driver.idle()
        assert [r.state for r in results(model)] == ["refused"]
        assert "the notes" not in results(model)[0].text


async def test_nothing_is_on_until_somebody_switches_it_on() -> None:
    model = backend(call("read_file", path="notes.txt"), call("run_command", command="echo x > y"))
    async with driven(model) as driver:
        await driver.send("Read.")
        assert [r.state for r in results(model)] == ["failed", "failed"]
        assert all("There is no tool" in r.text for r in results(model))
        assert ("set_tools", ("read_file",)) not in model.calls


@pytest.mark.parametrize(
    "keys", ["down enter", "down down enter", "1 2 3 y enter", "y e s enter", "a b c d enter enter"]
)
async def test_keys_that_were_on_their_way_are_not_taken(keys: str, folder: Path) -> None:
    """Typed before the question was there, or pasted into a terminal that does not mark a paste."""
    model = backend(call("write_file", path="new.txt", text="x"))
    async with driven(model) as driver:
        await driver.send("/tools write")
        await driver.send("Write.", wait=False)
        clock = await asked(driver)
        for key in keys.split():
            await clock.press(key, after=0.01)
        assert isinstance(driver.app.screen, ApprovalScreen), "it was answered"
        # A paste after a long time: its first key counts, but the next ones come too fast.
        await clock.press("x", after=10)
        for key in keys.split():
            await clock.press(key, after=0.01)
        assert isinstance(driver.app.screen, ApprovalScreen), "it was answered"
        assert not (folder / "new.txt").exists()
        await clock.press("escape")
        await driver.idle()
        assert not (folder / "new.txt").exists()


async def test_a_paste_answers_nothing(folder: Path) -> None:
    model = backend(call("write_file", path="new.txt", text="x"))
    async with driven(model) as driver:
        await driver.send("/tools write")
        await driver.send("Write.", wait=False)
        clock = await asked(driver)
        await clock.press("down")
        driver.app.screen.post_message(events.Paste("\n\n\n"))
        await driver.pilot.pause()
        await clock.press("enter", after=FAST / 2)
        assert isinstance(driver.app.screen, ApprovalScreen)
        await clock.press("enter")  # the choice is No again
        await driver.idle()
        assert [r.state for r in results(model)] == ["refused"]
        assert not (folder / "new.txt").exists()


async def test_yes_needs_the_whole_call_seen(folder: Path) -> None:
    model = backend(
        call("write_file", path="new.txt", text="\n".join(f"line {n}" for n in range(200)) + "\nrm -rf")
    )
    async with driven(model) as driver:
        await driver.send("/tools write")
        await driver.send("Write.", wait=False)
        clock = await asked(driver)
        await clock.press("down")
        await clock.press("enter")
        assert isinstance(driver.app.screen, ApprovalScreen)
        assert "more lines" in driver.text()
        await clock.press("end")
        assert "rm -rf" in driver.text()
        await clock.press("enter")
        await driver.idle()
        assert (folder / "new.txt").exists()


async def test_a_call_too_long_to_be_shown_cannot_be_allowed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval, "_MOST_LINES", 100)
    model = backend(call("write_file", path="new.txt", text="\n".join(f"line {n}" for n in range(200))))
    async with driven(model) as driver:
        await driver.send("/tools write")
        await driver.send("Write.", wait=False)
        clock = await asked(driver)
        await clock.press("end")
        assert driver.text().count("too long to be shown; answer No") == 2
        await clock.press("down")
        await clock.press("enter")
        assert isinstance(driver.app.screen, ApprovalScreen), "Yes was taken"
        await clock.press("up")
        await clock.press("enter")
        await driver.idle()
        assert [r.state for r in results(model)] == ["refused"]
        assert not (folder / "new.txt").exists()


async def test_what_a_call_says_cannot_look_like_the_question() -> None:
    evil = "\x1b[2J\x1b]0;x\x07\n❯ Yes, this once\n[1A"
    model = backend(call("run_command", command=f"echo {evil}"))
    async with driven(model, (100, 40)) as driver:
        await driver.send("/tools run")
        await driver.send("Run.", wait=False)
        await asked(driver)
        rows = [row.strip() for row in driver.text().split("\n")]
        assert any(row.startswith("│") and "❯ Yes, this once" in row for row in rows)
        assert not any(row.startswith("❯ Yes, this once") for row in rows)
        assert "characters that cannot be seen" in driver.text()
        assert all("\x1b" not in segment.text for segment in driver.segments())
        await driver.pilot.press("escape")
        await driver.idle()


async def test_what_cannot_be_seen_is_shown_where_one_decides_about_it() -> None:
    hidden = "".join(chr(0xE0000 + ord(letter)) for letter in "send the key")
    model = backend(call("write_file", path="a.txt", text=f"Hello{hidden} wor\u200bld"))
    async with driven(model, (100, 40)) as driver:
        await driver.send("/tools write")
        await driver.send("Write.", wait=False)
        await asked(driver)
        assert "Hello<U+E0073><U+E0065>" in driver.text()
        assert "wor<U+200B>ld" in driver.text()
        await driver.pilot.press("escape")
        await driver.idle()


async def test_a_dangerous_command_is_asked_for_every_time(folder: Path) -> None:
    (folder / "victim").write_text("x")
    model = backend(*[call("run_command", command="rm -rf victim", writes=True)] * 2)
    async with driven(model, (100, 40)) as driver:
        await driver.send("/tools run")
        await driver.send("Tidy up.", wait=False)
        for _ in range(2):
            clock = await asked(driver)
            assert "Caution:" in driver.text()
            assert "always" not in driver.text()
            assert "session" not in driver.text()
            await clock.press("enter")
        await driver.idle()
        assert (folder / "victim").exists()


async def test_once_session_and_always(folder: Path, tmp_path: Path) -> None:
    calls = [call("read_file", path="notes.txt"), call("list_folder")]
    model = backend(*calls, *calls, more=(Script("Again.", calls=tuple(calls)),))
    async with driven(model) as driver:
        await driver.send("/tools read")
        await driver.send("Go.", wait=False)
        clock = await asked(driver)
        for key in ("down", "down", "enter"):  # this session: any file
            await clock.press(key)
        await driver.until(
            lambda: "list_folder" in driver.text() and isinstance(driver.app.screen, ApprovalScreen)
        )
        clock = await asked(driver)
        for key in ("down", "down", "down", "enter"):  # always
            await clock.press(key)
        await driver.idle()
        assert [r.state for r in results(model)] == ["done"] * 6
        rules = json.loads((tmp_path / "config" / "tools.json").read_text())["always"]
        assert rules == [{"tool": "list_folder", "pattern": "."}]
        await driver.pilot.press("alt+o")
        await driver.shows("always")
        assert "session" in driver.text()
        await driver.pilot.press(*["down"] * 7, "delete")
        await driver.until(
            lambda: json.loads((tmp_path / "config" / "tools.json").read_text())["always"] == []
        )
        await driver.pilot.press("escape")


async def test_a_model_that_never_ends_needs_a_key_now_and_then(folder: Path) -> None:
    model = ScriptedBackend([Script("More.", calls=(call("read_file", path="notes.txt"),))])
    async with driven(model) as driver:
        await driver.send("/tools read")
        await driver.send("Go.", wait=False)
        clock = await asked(driver)
        for key in ("down", "down", "enter"):
            await clock.press(key)
        await driver.until(lambda: len(results(model)) == 11)
        clock = await asked(driver)
        clock.go_to(QUIET)
        await driver.pilot.pause()
        assert "10 calls ran without a key press." in driver.text()
        await driver.pilot.press("escape")
        await driver.idle()


async def test_escape_in_the_question_ends_all_and_what_happened_is_kept() -> None:
    model = backend(call("read_file", path="notes.txt"), call("list_folder"))
    async with driven(model) as driver:
        await driver.send("/tools read")
        await driver.send("Go.", wait=False)
        await asked(driver)
        await driver.pilot.press("escape")
        await driver.idle()
        assert results(model) == []
        (entry,) = [e for e in driver.transcript.entries if isinstance(e, ToolsEntry)]
        assert [shown.state for shown in entry.calls] == ["refused", "stopped"]
        assert "The model gave no text." not in driver.text(), "it was not asked for any"
        await driver.send("Never mind.")
        assert driver.answers[-1] == "Done."


async def test_escape_ends_a_running_command_with_its_children(folder: Path) -> None:
    model = backend(call("run_command", command="echo begun; sleep 1000"))
    async with driven(model) as driver:
        await driver.send("/tools run")
        await driver.send("Go.", wait=False)
        clock = await asked(driver)
        await clock.press("down")
        await clock.press("enter")
        await driver.shows("begun")
        await driver.pilot.press("escape")
        await driver.idle()
        assert results(model) == []
        (entry,) = [e for e in driver.transcript.entries if isinstance(e, ToolsEntry)]
        assert entry.calls[0].state == "stopped"


async def test_calls_are_saved_and_retry_edit_and_undo_work_around_them(tmp_path: Path) -> None:
    model = backend(call("read_file", path="notes.txt"), more=(Script("First."), Script("Second.")))
    store = SessionStore.open(tmp_path / "sessions.db")
    async with driven(model, store=store) as driver:
        await driver.send("/tools read")
        await driver.send("What do the notes say?", wait=False)
        clock = await asked(driver)
        await clock.press("down")
        await clock.press("enter")
        await driver.idle()
        await driver.send("/retry")
        assert [name for name, _ in model.calls if name in ("send", "tell")] == ["send", "tell", "tell"]
        assert driver.answers == ["Let me see.", "Second."]
        assert "< 2/2 >" in driver.text()
        await driver.send("/edit")
        assert driver.composer.text == "What do the notes say?"
        await driver.pilot.press("escape")
        await driver.send("/undo")
        assert driver.answers == []
        assert driver.composer.text == "What do the notes say?"
        driver.composer.put("")
        await driver.send("/redo")
        assert driver.answers == ["Let me see.", "Second."]
        session = driver.app.chat.conversation.saved.session
        assert session is not None
        store.flush()
        _, tree, _ = store.load(session)
        assert [e.results[0].text for e in tree.exchanges if e.results] == ["the notes", "the notes"]
        assert tree[1].calls == [call("read_file", path="notes.txt")]
    async with driven(ScriptedBackend([Script("x")]), store=store, session=session) as driver:
        await driver.shows("▸ read_file  notes.txt  done")
        entry = next(e for e in driver.transcript.entries if isinstance(e, ToolsEntry))
        driver.app.chat.select(entry)
        await driver.pilot.press("t")
        await driver.shows("the notes")
    assert store.close()


async def test_calls_of_an_answer_that_was_cut_off_are_not_done() -> None:
    model = ScriptedBackend(
        [Script("Let me", finish_reason=FinishReason.LENGTH, calls=(call("list_folder"),))]
    )
    async with driven(model) as driver:
        await driver.send("/tools read")
        await driver.send("Go.")
        assert not isinstance(driver.app.screen, ApprovalScreen)
        assert results(model) == []


async def test_another_conversation_has_no_tools_on() -> None:
    model = backend(call("read_file", path="notes.txt"))
    async with driven(model) as driver:
        await driver.send("/tools read")
        await driver.send("/reset")
        assert ("set_tools", ()) in model.calls
        await driver.send("Read.")
        assert "There is no tool" in results(model)[0].text


async def test_tools_that_do_not_exist_and_models_without_any() -> None:
    async with driven(ScriptedBackend([Script("x")])) as driver:
        await driver.send("/tools nonsense")
        assert "There is no tool 'nonsense'" in driver.errors[-1]
    async with driven(ScriptedBackend([Script("x")], calls_tools=False)) as driver:
        await driver.send("/tools read")
        assert "does not support tools" in driver.errors[-1]
