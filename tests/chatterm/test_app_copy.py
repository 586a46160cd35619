"""Copying: exactly what the model wrote, through the system's clipboard and the terminal's."""

import stat
import sys
from pathlib import Path

import pytest

from chatterm.markdown.code import CodeBlock, code_blocks
from chatterm.terminal.clipboard import copied_text, copy, programs
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend

ANSWER = (
    "\n\nTwo ways, **both** fine:\n\n```python\nif x:\n\treturn  'a'   \n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "1. item\n\n   ~~~\n   nested\n   ~~~\n\nA long line " + "word " * 60
)


async def answered(driver: Driver, *copied: str) -> None:
    def take(text: str) -> str:
        taken.append(text)
        return "xclip"

    taken: list[str] = []
    driver.app.chat.copy_with = take
    await driver.send("q")
    for number, command in enumerate(copied):
        await driver.send(command, wait=False)
        await driver.until(lambda number=number: len(taken) == number + 1)  # type: ignore[misc]
    driver.taken = taken  # type: ignore[attr-defined]


async def test_what_is_copied_is_what_the_model_wrote() -> None:
    async with driven(ScriptedBackend([Script(ANSWER, reasoning="Hm.")], thinks=True)) as driver:
        await answered(
            driver, "/copy", "/copy 1", "/copy -1", "/copy code 1", "/copy code 2", "/copy code", "/copy all"
        )
        answer, code = ANSWER.lstrip("\n"), "if x:\n\treturn  'a'   "
        taken = driver.taken  # type: ignore[attr-defined]
        assert taken[:6] == [answer, answer, answer, code, "nested", "nested"]
        assert "▌" not in taken[6]
        assert "## You\n\nq" in taken[6]
        assert driver.app.clipboard == taken[6]
        await driver.shows("characters (xclip).")


async def test_copy_of_the_selected_message_by_key() -> None:
    async with driven(ScriptedBackend([Script("plain"), Script("```\ncode\n```")])) as driver:
        await answered(driver)
        await driver.send("second?")
        await driver.pilot.press("alt+up", "up", "up", "c")
        await driver.until(lambda: driver.app.clipboard == "plain")
        await driver.pilot.press("up", "c")
        await driver.until(lambda: driver.app.clipboard == "q")
        await driver.pilot.press("escape", "alt+k")
        await driver.until(lambda: driver.app.clipboard == "code")
        await driver.pilot.press("alt+c")
        await driver.until(lambda: driver.app.clipboard == "```\ncode\n```")


async def test_a_click_on_a_code_block_copies_it() -> None:
    text = "```py\nfirst()\n```\n\n" + "x\n\n" * 3 + "```py\nsecond()\n```\n"
    async with driven(ScriptedBackend([Script(text)])) as driver:
        await answered(driver)
        lines = driver.text().split("\n")
        rows = [y for y, line in enumerate(lines) if "copy" in line]
        for row, code in zip(rows, ("first()", "second()"), strict=True):
            await driver.pilot.click(offset=(lines[row].index("copy") + 1, row))
            await driver.until(lambda code=code: driver.app.clipboard == code)  # type: ignore[misc]


async def copies_to_the_end(driver: Driver, begin: str) -> None:
    """Drag the mouse from the line with `begin` to the line "end", and copy."""
    lines = driver.text().split("\n")
    first = next(y for y, line in enumerate(lines) if begin in line)
    last = next(y for y, line in enumerate(lines) if line.strip() == "end")
    await driver.pilot.mouse_down(offset=(2, first))
    await driver.pilot.hover(offset=(30, last))
    await driver.pilot.mouse_up(offset=(30, last))
    await driver.pilot.press("ctrl+c")
    await driver.until(lambda: driver.app.clipboard)


async def test_a_selection_has_no_borders_and_no_padding() -> None:
    text = "- one\n\n> quoted\n\n```py\nx = 1\n\n  y\n```\n\nend"
    async with driven(ScriptedBackend([Script(text)])) as driver:
        await answered(driver)
        await copies_to_the_end(driver, "▌ q")
        assert driver.app.clipboard == "q\n\n• one\n\nquoted\n\nx = 1\n\n  y\n\nend"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/copy", "There is no answer yet."),
        ("/copy x", "'x' is not a number"),
        ("/copy " + "x" * 600, "x…' is not a number; messages are numbered from 1, or from the end with -1."),
        ("/copy code", "There is no answer yet."),
        ("/copy all", "There is no answer yet."),
        ("/copy all x", "/copy all takes nothing more, not 'x'."),
    ],
)
async def test_there_is_nothing_to_copy(command: str, said: str) -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send(command)
        assert said in driver.errors[0]


async def test_numbers_that_are_not_there() -> None:
    async with driven(ScriptedBackend([Script("```\nx\n```")])) as driver:
        await answered(driver)
        for command in ("/copy 2", "/copy 0", "/copy code 2", "/copy code 0", "/copy code one"):
            await driver.send(command)
        assert len(driver.errors) == 5
        assert driver.errors[0] == "There is no message 2; the conversation has 1."


def test_code_blocks_of_an_unfinished_answer() -> None:
    assert code_blocks("text\n\n```py\nx = 1\n") == [CodeBlock("py", "x = 1")]
    assert code_blocks("") == []
    assert code_blocks("    indented\n\nno\n") == [CodeBlock("", "indented")]


def test_programs_are_chosen_by_what_there_is() -> None:
    def everything(name: str) -> str:
        return "/bin/" + name

    wayland = programs({"WAYLAND_DISPLAY": "w", "DISPLAY": ":0"}, "linux", everything)
    assert [command[0] for command in wayland] == ["wl-copy", "xclip", "xsel"]
    assert programs({}, "darwin", everything) == [["pbcopy"]]
    assert programs({"TMUX": "x"}, "linux", everything) == [["tmux", "load-buffer", "-w", "-"]]
    assert programs({"DISPLAY": ":0"}, "linux", lambda _: None) == []


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")
def test_a_program_that_fails_is_not_believed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    good = script(tmp_path / "good", f"cat > {out}")
    bad = script(tmp_path / "bad", "exit 1")
    text = "exactly\x1b[31m\tthis  \n"
    assert copy(text, [[bad], [str(tmp_path / "missing")], [good]]) == good
    assert out.read_bytes() == text.encode()
    assert copy(text, [[bad]]) == ""


def test_only_what_is_true_is_said() -> None:
    assert copied_text("x", "wl-copy") == "Copied 1 character (wl-copy)."
    assert copied_text("xy", "") == "Sent 2 characters to the terminal's clipboard (OSC 52)."
    assert "/export" in copied_text("x" * 100_000, "")


def script(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


async def test_a_selection_has_no_line_breaks_but_those_of_the_model() -> None:
    prose = "A paragraph of many words that is much longer than one line of this terminal, which has eighty columns."
    code = "value = " + " + ".join(f"item_{number}" for number in range(12))
    text = f"{prose}\n\n```py\n{code}\n```\n\nend"
    async with driven(ScriptedBackend([Script(text)])) as driver:
        await answered(driver)
        await copies_to_the_end(driver, "A paragraph")
        assert driver.app.clipboard == f"{prose}\n\n{code}\n\nend"
