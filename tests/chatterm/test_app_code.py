"""Code blocks of an answer in the application: saved under a name, run after a question."""

from pathlib import Path

import pytest
from textual.widgets import Input

from chatterm.backends.backend import EngineError
from chatterm.conversation.tool_entry import RunEntry
from chatterm.markdown.code import CodeBlock
from chatterm.screens.approval import ApprovalScreen
from chatterm.screens.chat.code_blocks import shell_command
from chatterm.screens.code import ChooseCodeScreen, SaveCodeScreen
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

TEXT = "Two:\n\n```python\nprint(6 * 7)\n```\n\nand\n\n```sh\necho ran > /dev/stderr\n```\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("CHATTERM_CONFIG", str(tmp_path / "config" / "config.toml"))
    return work


async def test_a_block_is_saved_and_nothing_overwritten_unasked(folder: Path) -> None:
    (folder / "there.py").write_text("mine")
    async with driven(ScriptedBackend([Script(TEXT)])) as driver:
        await driver.send("code")
        driver.app.chat.select(driver.app.chat.transcript.entries[-1])
        await driver.pilot.press("s", "1")
        await driver.until(lambda: isinstance(driver.app.screen, SaveCodeScreen))
        screen = driver.app.screen
        screen.query_one(Input).value = "there.py"
        await driver.pilot.press("enter")
        await driver.pilot.pause()
        assert driver.app.screen is screen
        assert (folder / "there.py").read_text() == "mine"
        screen.query_one(Input).value = "new.py"
        await driver.pilot.pause()
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
    assert (folder / "new.py").read_text() == "print(6 * 7)\n"
    assert (folder / "there.py").read_text() == "mine"


async def test_what_is_overwritten_is_whole_before_and_after(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "kept.py").write_text("mine")
    (folder / "kept.py").chmod(0o750)
    (folder / "link.py").symlink_to("kept.py")

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    async with driven(ScriptedBackend([Script(TEXT)])) as driver:
        await driver.send("code")
        driver.app.chat.select(driver.app.chat.transcript.entries[-1])
        await driver.pilot.press("s", "1")
        await driver.until(lambda: isinstance(driver.app.screen, SaveCodeScreen))
        driver.app.screen.query_one(Input).value = "link.py"
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", full)
            await driver.pilot.press("enter", "enter")
            await driver.shows("No space left")
        assert (folder / "kept.py").read_text() == "mine"
        assert sorted(path.name for path in folder.iterdir()) == ["kept.py", "link.py"]
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
    assert (folder / "link.py").is_symlink()
    assert (folder / "kept.py").read_text() == "print(6 * 7)\n"
    assert (folder / "kept.py").stat().st_mode & 0o777 == 0o750


async def test_of_several_blocks_a_digit_says_which(folder: Path) -> None:
    blocks = "".join(f"```sh\necho {number}\n```\n" for number in range(1, 8))
    async with driven(ScriptedBackend([Script(blocks)])) as driver:
        await driver.send("code")
        copied: list[str] = []
        driver.app.chat.copy_with = lambda text: copied.append(text) or ""  # type: ignore[func-returns-value]
        driver.app.chat.select(driver.app.chat.transcript.entries[-1])
        await driver.pilot.press("y")
        await driver.shows("1 to 7 takes one")
        assert copied == []
        await driver.pilot.press("8", "3")
        await driver.until(lambda: copied == ["echo 3"])
        await driver.pilot.press("s", "5")
        await driver.until(lambda: isinstance(driver.app.screen, SaveCodeScreen))
        assert "echo 5" in driver.text()
        await driver.pilot.press("escape", "x", "2")
        await driver.until(lambda: isinstance(driver.app.screen, ApprovalScreen))
        assert "echo 2" in driver.text()


@pytest.mark.parametrize("answer", ["once", "no"])
async def test_a_block_runs_only_after_a_yes(answer: str) -> None:
    async with driven(ScriptedBackend([Script(TEXT)])) as driver:
        await driver.send("code")
        driver.app.chat.select(driver.app.chat.transcript.entries[-1])
        for keys in (["escape"], ["enter"] if answer == "once" else ["up", "up", "enter"]):
            await driver.pilot.press("x")
            await driver.until(lambda: isinstance(driver.app.screen, ChooseCodeScreen))
            await driver.pilot.press(*keys)
        await driver.until(lambda: isinstance(driver.app.screen, ApprovalScreen))
        screen = driver.app.screen
        assert isinstance(screen, ApprovalScreen)
        line = "  echo ran > /dev/stderr" if answer == "once" else "  print(6 * 7)"
        assert (line, "text") in screen._plan.shown
        assert not any(isinstance(entry, RunEntry) for entry in driver.app.chat.transcript.entries)
        screen.dismiss(answer)  # type: ignore[arg-type]
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        if answer == "once":
            await driver.until(lambda: isinstance(driver.app.chat.transcript.entries[-1], RunEntry))
            entry = driver.app.chat.transcript.entries[-1]
            assert isinstance(entry, RunEntry)
            await driver.until(lambda: entry.shown.state == "done")
            assert entry.shown.text == "ran\n[exit code 0]"
            assert not entry.shown.is_open
            await driver.pilot.press("ctrl+t")
            assert entry.shown.is_open
        else:
            await driver.pilot.pause()
            assert not any(isinstance(entry, RunEntry) for entry in driver.app.chat.transcript.entries)


@pytest.mark.parametrize(
    ("block", "said"), [("sh\necho one > /dev/stderr", ApprovalScreen), ("rust\nfn main() {}", None)]
)
async def test_where_there_is_one_block_nobody_asks_which(block: str, said: type | None) -> None:
    async with driven(ScriptedBackend([Script(f"```{block}\n```\n")])) as driver:
        await driver.send("code")
        driver.app.chat.select(driver.app.chat.transcript.entries[-1])
        await driver.pilot.press("x")
        if said is not None:
            await driver.until(lambda: isinstance(driver.app.screen, said))
        else:
            await driver.until(lambda: any("Only sh, bash and Python" in text for text, _ in driver.said))
            assert driver.app.screen is driver.app.chat


def test_nothing_in_a_block_ends_what_it_is_given_to() -> None:
    text = "x = 1\nEND\nEND_END"
    command = shell_command(CodeBlock("python", text))
    mark = command.splitlines()[-1]
    assert command == f"python3 - <<'{mark}'\n{text}\n{mark}"
    assert mark not in text.splitlines()
    with pytest.raises(EngineError, match="rust"):
        shell_command(CodeBlock("rust", "fn main() {}"))
