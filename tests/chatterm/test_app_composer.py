"""Writing: lines, pastes, files, size, the list of commands."""

from pathlib import Path

import pytest
from textual import events

from chatterm.widgets.completion import Completion
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import ScriptedBackend


def paste(driver: Driver, text: str) -> None:
    driver.composer.post_message(events.Paste(text))


async def test_lines_are_broken_without_sending() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.types("a")
        await driver.pilot.press("ctrl+j")
        await driver.types("b")
        await driver.pilot.press("shift+enter")
        await driver.types("c")
        await driver.pilot.press("alt+enter")
        await driver.types("d")
        assert driver.composer.text == "a\nb\nc\nd"
        assert "send" not in [name for name, _ in backend.calls]
        await driver.pilot.press("enter")
        await driver.idle()
        assert ("send", "a\nb\nc\nd") in backend.calls
        assert "▌ a\n  ▌ b" in driver.text()


async def test_a_paste_of_several_lines_does_not_send() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.types("see ")
        paste(driver, "line 1\r\nline 2\rline 3\n")
        await driver.until(lambda: "line 3" in driver.composer.text)
        assert driver.composer.text == "see line 1\nline 2\nline 3\n"
        assert "send" not in [name for name, _ in backend.calls]


async def test_a_paste_of_a_megabyte_is_taken() -> None:
    async with driven(ScriptedBackend()) as driver:
        text = "a line of some length, pasted\n" * 34_000
        paste(driver, text)
        await driver.until(lambda: len(driver.composer.full_text) == len(text))
        await driver.types("x")
        assert driver.composer.full_text.endswith("pasted\nx")


async def test_a_folded_paste_is_sent_whole_and_up_brings_it_back() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        text = "".join(f"row {n}\n" for n in range(1204))
        await driver.types("see ")
        paste(driver, text)
        await driver.shows("see [pasted 1,204 lines]")
        await driver.pilot.press("enter")
        await driver.idle()
        assert ("send", f"see {text}".strip("\n")) in backend.calls
        assert driver.composer.text == ""
        await driver.pilot.press("up")
        assert driver.composer.full_text == f"see {text}"


async def test_a_file_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("keep this", encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    monkeypatch.chdir(tmp_path)
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.types("sum up @no")
        await driver.shows("notes.txt")
        await driver.pilot.press("tab", "enter")
        await driver.until(lambda: [name for name, _ in backend.calls if name == "send"])
        sent = next(value for name, value in backend.calls if name == "send")
        assert sent == "sum up notes.txt\n\nnotes.txt:\n```txt\nkeep this\n```"
        await driver.idle()
        await driver.send("and @image.png", wait=False)
        await driver.until(lambda: driver.errors)
        assert driver.errors == [
            "image.png is a picture, and the models on this machine read text only; describe it in words, "
            "or choose a remote model that sees."
        ]
        assert driver.composer.text == "and @image.png"


async def test_an_editor_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "no-such-editor")
    async with driven(ScriptedBackend()) as driver:
        await driver.types("draft")
        await driver.pilot.press("ctrl+g")
        await driver.until(lambda: driver.errors)
        assert driver.errors == ["VISUAL names the editor no-such-editor, which was not found."]
        assert driver.composer.text == "draft"


async def test_it_grows_to_a_third_of_the_screen() -> None:
    async with driven(ScriptedBackend(), (80, 30)) as driver:
        assert driver.composer.size.height == 1
        driver.composer.put("one\ntwo\nthree")
        await driver.until(lambda: driver.composer.size.height == 3)
        driver.composer.put("\n".join("many lines"))
        await driver.until(lambda: driver.composer.outer_size.height == 9)
        assert "s" in driver.text().split("\n")[-3]  # the last line, where the cursor is, can be seen


async def test_tab_indents_and_keeps_the_focus() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.types("a")
        await driver.pilot.press("tab")
        assert driver.composer.text == "a    "
        assert driver.composer.has_focus


async def test_a_list_of_commands_opens_while_typing() -> None:
    async with driven(ScriptedBackend()) as driver:
        completion = driver.app.chat.query_one(Completion)
        assert not completion.display
        await driver.pilot.press("slash")
        await driver.shows("/branch [prev|next]")
        await driver.types("re")
        await driver.until(lambda: "/stop" not in driver.text())
        assert "/reset" in driver.text()
        assert "/retry" in driver.text()
        await driver.pilot.press("down", "tab")
        assert driver.composer.text == "/redo"
        await driver.until(lambda: not completion.display)


async def test_enter_on_a_command_of_the_list_runs_it() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.types("/he")
        await driver.pilot.press("enter")
        await driver.shows("Show commands and keys")
        assert driver.composer.text == ""


async def test_typing_faster_than_the_list_follows_runs_what_was_typed() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.pilot.press("slash")
        await driver.shows("/help")
        for key in [*(events.Key(c, c) for c in "quit"), events.Key("enter", "\r")]:
            driver.composer.post_message(key)
        await driver.until(lambda: driver.app.return_value == 0)


async def test_a_command_with_arguments_is_completed_then_its_choices() -> None:
    backend = ScriptedBackend(thinks=True)
    async with driven(backend) as driver:
        await driver.types("/th")
        await driver.pilot.press("down", "up", "enter")
        assert driver.composer.text in ("/think ", "/theme ")
        driver.composer.put("/think o")
        await driver.shows("/think off")
        await driver.pilot.press("down", "enter")
        await driver.until(lambda: backend.think == "off")


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("temperature 0", "temperature", 0.0),
        ("max_tokens 4", "max_tokens", 4),
        ("top_k 4", "top_k", 4),
        ("seed 4", "seed", 4),
        ("speculation o", "speculation", "off"),
    ],
)
async def test_a_value_that_is_one_is_sent_as_it_was_typed(typed: str, name: str, value: object) -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.types(f"/set {typed}")
        await driver.until(lambda: driver.app.screen.query_one(Completion).display)
        await driver.pilot.press("enter")
        await driver.until(lambda: name in backend.sampling)
        assert backend.sampling[name] == value


async def test_a_row_that_was_moved_to_is_taken_instead() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await driver.types("/set temperature 0")
        await driver.shows("/set temperature 0.7")
        await driver.pilot.press("down", "enter")
        await driver.until(lambda: backend.sampling == {"temperature": 0.7})


async def test_escape_closes_the_list_and_keeps_the_text() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.types("/st")
        await driver.shows("/stats")
        await driver.pilot.press("escape")
        await driver.until(lambda: "/stats" not in driver.text())
        assert driver.composer.text == "/st"


async def test_a_click_chooses() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.types("/re")
        await driver.shows("/reset")
        row = next(y for y, line in enumerate(driver.text().split("\n")) if "/reset" in line)
        await driver.pilot.click(offset=(5, row))
        await driver.until(lambda: driver.composer.text == "/reset")
        assert driver.composer.has_focus


async def test_the_palette_runs_commands() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.pilot.press("ctrl+p")
        await driver.types("stats")
        await driver.shows("Statistics of the last")
        await driver.pilot.press("enter")
        await driver.shows("There are no answers yet.")


async def test_selected_text_is_copied_by_control_c() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.types("copy me")
        driver.composer.select_all()
        await driver.pilot.press("ctrl+c")
        assert driver.app.clipboard == "copy me"
        assert driver.composer.text == "copy me"
        assert driver.app.return_value is None


async def test_what_is_typed_right_after_enter_stays() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        driver.composer.put("first")
        driver.composer.send()  # the screen is busy and does not see it yet
        driver.composer.insert("second")
        await driver.until(lambda: driver.composer.text == "second")
        await driver.idle()
        assert driver.questions == ["first"]
        assert ("send", "first") in backend.calls


async def test_keys_that_come_in_one_burst_are_taken_in_their_order() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.types("ab")
        for key, character in (("backspace", None), ("c", "c"), ("left", None), ("delete", None), ("d", "d")):
            driver.app.post_message(events.Key(key, character))
        await driver.until(lambda: "d" in driver.composer.text)
        assert driver.composer.text == "ad"
