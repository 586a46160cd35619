"""Whatever comes from outside is shown, never obeyed: not by the terminal and not by the markup of the screen."""

import os
import re
import sys
import textwrap
from pathlib import Path

import pexpect
import pytest
from rich.segment import Segment
from textual import events

from chatterm.backends.backend import EngineError, ModelChoice, ModelError
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import PATIENCE

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b]52;c;b3duZWQ=\x07\x1b]8;;file:///etc/passwd\x1b\\\x9b31m\u202e\ud800end"
)
MARKUP = "[bold red]not markup[/] [@click=app.quit]no[/] [link=file:///x]l[/link]"


def assert_harmless(segments: list[Segment]) -> None:
    for text, style, control in segments:
        assert control is None
        assert not [c for c in text if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000], (
            text
        )
        assert not set(text) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068"), text
        assert style is None or style.link is None, "a hyperlink reaches the terminal"


async def checked(driver: Driver) -> str:
    await driver.pilot.pause()
    assert_harmless(driver.segments())
    return driver.text()


@pytest.mark.parametrize("width", [80, 130])
async def test_generated_text(width: int) -> None:
    answer = (
        f"{HOSTILE}\n\n```\n{HOSTILE}\n```\n\n| {HOSTILE} |\n|---|\n\n&#27;[2J &#x9b;31m &#x202e; `{HOSTILE}`"
    )
    backend = ScriptedBackend([Script(answer, reasoning=HOSTILE)])
    async with driven(backend, (width, 40)) as driver:
        await driver.send("/think show")
        await driver.send("q")
        text = await checked(driver)
        assert "␛[2J" in text
        assert "end" in text


async def test_links_of_a_model_are_text() -> None:
    links = "[a](javascript:alert(1)) [b](file:///etc/passwd) [c](https://example.com) <https://example.org> ![i](http://x/i.png)"
    async with driven(ScriptedBackend([Script(links)]), (120, 24)) as driver:
        await driver.send("q")
        text = await checked(driver)
        assert "c (https://example.com)" in text
        assert not [s for _, s, _ in driver.segments() if s is not None and s.meta.get("@click")]


async def test_typed_and_pasted_text() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        driver.composer.post_message(events.Paste(HOSTILE + "\r\nnext"))
        await driver.until(lambda: "next" in driver.composer.text)
        assert driver.composer.text == "\ufffdend\nnext"
        await checked(driver)
        await driver.pilot.press("enter")
        await driver.idle()
        assert ("send", "\ufffdend\nnext") in backend.calls
        await driver.send(HOSTILE)
        await checked(driver)
        assert backend.calls[-2] == ("send", "\ufffdend")


async def test_markup_is_text_everywhere() -> None:
    backend = ScriptedBackend(
        [Script(MARKUP, reasoning=MARKUP), Script(error=EngineError(MARKUP))], model=MARKUP
    )
    async with driven(backend, (140, 40)) as driver:
        await driver.send("/think show")
        await driver.send(MARKUP)
        text = await checked(driver)
        assert text.count("[bold red]not markup[/]") >= 4  # typed, thought, answered, the model's name
        await driver.send("again")
        assert MARKUP in driver.errors[0]
        await driver.send("/system " + MARKUP)
        await driver.send("/system")
        await driver.send("/" + MARKUP)
        await checked(driver)


async def test_names_and_errors() -> None:
    error = ModelError(f"No model {HOSTILE}.")
    backend = ScriptedBackend(load_error=error, model=HOSTILE, choices=[ModelChoice(HOSTILE, 1, True, None)])
    async with driven(backend, (140, 40), ready=False) as driver:
        await driver.until(lambda: driver.errors)
        await checked(driver)
        await driver.send("/model")
        await driver.shows("downloaded")
        await checked(driver)
        await driver.pilot.press("escape")
        await driver.send(f"/model {HOSTILE}")
        await driver.shows("Now chatting with")
        await checked(driver)


async def test_a_session_that_somebody_else_wrote(tmp_path: Path) -> None:
    store = SessionStore.open(tmp_path / "sessions.db")
    tree = Tree()
    for user in (HOSTILE, HOSTILE + "2"):
        exchange = tree.add(None, user, HOSTILE.replace("\ud800", ""))
        exchange.text, exchange.reasoning, exchange.finish_reason = HOSTILE, HOSTILE, "\x1b[2J"
    info = SessionInfo(title=HOSTILE, model=HOSTILE, system=HOSTILE)
    session = store.add(info, tree.exchanges, tree.head)
    async with driven(ScriptedBackend(thinks=True), (140, 40), store=store) as driver:
        await driver.send("/sessions")
        await driver.shows("1 message, 2 branches")
        await checked(driver)
        await driver.pilot.press("enter")
        await driver.shows("< 2/2 >")
        await driver.idle()
        await driver.pilot.press("ctrl+t", "alt+up")
        await checked(driver)
        await driver.pilot.press("alt+left", "e")
        await checked(driver)
        await driver.pilot.press("escape")
        await driver.send("/export md " + str(tmp_path / "out.md"))
        await driver.until(lambda: (tmp_path / "out.md").exists())
        await driver.send("/rename " + HOSTILE.replace("\n", " "))
        await checked(driver)
    assert "\x1b" not in (tmp_path / "out.md").read_text()
    assert store.load(session)[1].exchanges[0].text == HOSTILE.replace("\ud800", "?")
    store.close()


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from chatterm.app import run_app
from tests.chatterm.scripted import Script, ScriptedBackend
sys.exit(run_app(ScriptedBackend([Script({answer!r})]), theme=None))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_real_terminal_gets_no_command_from_the_model(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    child = pexpect.spawn(
        sys.executable,
        ["-c", textwrap.dedent(PROGRAM).format(root=root, answer=HOSTILE.replace("\ud800", ""))],
        env={**os.environ, "CHATTERM_DATA": str(tmp_path), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
        dimensions=(24, 80),
        timeout=PATIENCE,
    )
    child.expect(b"ready")
    seen = child.before
    child.send(b"caf\xc3\xa9 \xff\xfe\xc3(\r")  # bytes that are no UTF-8 must not end the chat
    child.expect(b"first token after")
    seen += child.before
    child.send(b"/quit\r")
    child.expect(pexpect.EOF)
    seen += child.before
    child.close()
    assert child.exitstatus == 0
    titles = re.findall(rb"\x1b\]0;([^\x07]*)\x07", seen)  # the only ones are our own
    assert all(re.fullmatch(rb"(loading|ready|answering) - scripted - chatterm", title) for title in titles)
    assert len(titles) == seen.count(b"\x1b]0;") > 0
    assert seen.index(b"\x1b[22;0t") < seen.index(b"\x1b]0;") < seen.index(b"\x1b[23;0t")
    for command in (b"\x1b]52;", b"\x1b]8;", "\x9b31m".encode(), "\u202e".encode()):
        assert command not in seen
    assert seen.rindex(b"\x1b[?1049l") > seen.rindex(b"\x1b[?1049h")  # the terminal is given back
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
